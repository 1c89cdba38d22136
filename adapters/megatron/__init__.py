"""Megatron-Core: the zoo's models under its data-parallel wrapper, distributed optimizer, schedules and checkpoints.

model = um.load(folder, experts=layout.held())
stages = layout.wrap(model, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True))
optimizer = layout.optimizer(stages, OptimizerConfig(bf16=True, use_distributed_optimizer=True, lr=1e-5))
told, grad_norm = train.step(stages, optimizer, microbatches, loss)
"""
