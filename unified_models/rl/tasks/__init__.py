"""Toy tasks with answers that a program verifies; one file each, over a byte tokenizer."""

from unified_models.rl.tasks.arithmetic import Arithmetic
from unified_models.rl.tasks.calculator import Calculator
from unified_models.rl.tasks.task import Part, Problem, Task

TASKS: dict[str, Task] = {task.name: task for task in (Arithmetic(), Calculator())}

__all__ = ["TASKS", "Part", "Problem", "Task"]
