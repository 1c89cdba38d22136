"""verl's own code drives our engine, and its rollout has the training forward's bits."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Child = Callable[..., Any]
NAMES = ("nemotron_h", "deepseek_v4")
each = pytest.mark.parametrize("name", NAMES)
SAMPLED, SCORED = 32, 30  # tokens; two of the sampled are masked
pytestmark = pytest.mark.slow(90)


@pytest.fixture(scope="module")
def found(child: Child, checkpoints: Path) -> Any:
    """What child.py found, by architecture."""
    return child("child.py", checkpoints)


@each
def test_engine_is_found_by_name(found: Any, name: str) -> None:
    assert found[name]["on_policy"]["class"] == "UnifiedEngine"


@each
def test_debug_metrics_of_our_rollout_A38(found: Any, name: str) -> None:
    """(valid, max, mean, std, k3) is (1, 0, 0, 0, 0) by verl's own functions, and the bits are those of um.logprobs.
    verl's numbers alone would not do: of a fault of one ulp they may see nothing."""
    told = found[name]["on_policy"]
    assert told["debug"] == [1, 0, 0, 0, 0]
    assert told["same_as_logprobs"] == [SAMPLED, 0]
    assert told["debug_of_fault"] < 1e-6


@each
def test_entropy(found: Any, name: str) -> None:
    """Of every scored token, between 0 and that of 512 equal ones, and not all alike."""
    values = found[name]["on_policy"]["entropy"]
    assert len(values) == SCORED
    assert 0 < min(values) < max(values) < math.log(512)


@each
def test_policy_loss_on_policy(found: Any, name: str) -> None:
    """verl's ppo_loss through train_batch: no ratio is off 1, every token was compared, and the step moved weights."""
    told = found[name]["on_policy"]
    step = told["step"]
    assert step["actor/ppo_kl"] == step["actor/pg_clipfrac"] == 0
    assert (step["bits/compared"], step["bits/unequal"]) == (SCORED, 0)
    assert step["grad_norm"] > 0 and len(told["loss"]) == 2, "two micro-batches"
    compared, unequal = told["after_step"]
    assert unequal > compared / 2


@each
def test_one_ulp_stops_the_run(found: Any, name: str) -> None:
    """The token is named with both patterns, in inference and before an update; no weight moves, no gradient stays."""
    told = found[name]["on_policy"]
    rollout, training = told["patterns"]
    expected = (
        f"UnequalError: 1 of {SCORED} response tokens have other bits in the training forward; the first is "
        f"sequence 2, response token 6 (id {told['token']}): rollout {rollout}, training {training}"
    )
    assert int(rollout, 16) ^ int(training, 16) == 1
    assert told["infer_fault"] == told["train_fault"] == expected
    assert told["after_faults"][0] > 10_000 and told["after_faults"][1] == 0
    assert told["gradients"] == 0
    assert told["masked_fault"] == "nothing was raised", "tokens that the policy did not say"


@each
def test_nothing_compared_is_an_error_A38(found: Any, name: str) -> None:
    told = found[name]["on_policy"]
    assert told["nothing"].startswith("UnequalError: nothing was compared")
    assert "rollout.calculate_log_probs=True" in told["missing"]


@each
def test_updates_after_the_first_A38(found: Any, name: str) -> None:
    """The weights have moved on: recomputed old logprobs are compared; the rollout's own in their place are refused."""
    told = found[name]["on_policy"]
    assert (told["second"]["bits/compared"], told["second"]["bits/unequal"]) == (SCORED, 0)
    assert told["second"]["actor/ppo_kl"] != 0, "the control: the weights did move"
    assert f"1 of {SCORED} response tokens" in told["second_fault"]
    assert "sequence 0, response token 0" in told["second_fault"]
    assert told["bypass"].startswith("ValueError: 1 updates since the weights were sent")


@each
def test_rollout_of_older_weights(found: Any, name: str) -> None:
    """After the new weights were sent, an old rollout is not on-policy: stopped, or told and counted."""
    told = found[name]["on_policy"]
    assert told["stale"].startswith("UnequalError:")
    assert told["report"]["bits/compared"] == SCORED
    assert told["report"]["bits/unequal"] > SCORED / 2


@each
def test_checkpoint_resumes_exactly_A35_F17(found: Any, name: str) -> None:
    """Masters, moments, random states and the first logprobs before any update; and the next step."""
    told = found[name]["resume"]
    for what in ("masters", "moments", "random", "first", "rollout", "weights_sent", "after"):
        compared, unequal = told[what]
        assert compared > 0 and unequal == 0, what
    assert told["moments"][0] > 1.5 * told["masters"][0], "two for each trained value"
    assert told["fourth"][0] == told["fourth"][1]
    assert told["fourth"][0]["lr"] == pytest.approx(0.8e-3), "in the middle of the warm-up"
    assert told["files"] == ["actor"], "nothing half written stays"


@each
def test_checkpoint_refusals(found: Any, name: str) -> None:
    told = found[name]["resume"]
    assert "extra-0-of-1.json is missing (there: extra-0-of-2.json)" in told["processes"]
    assert "no complete checkpoint" in told["absent"]
    assert "saved without ['extra', 'optimizer']" in told["partial"]


@each
def test_checkpoint_by_official_names(found: Any, name: str) -> None:
    """ "hf_model" in save_contents: a folder for um.load, with the bits of the masters."""
    compared, unequal = found[name]["resume"]["official"]
    assert compared > 10_000 and unequal == 0


@each
def test_step_without_a_learning_rate_F16(found: Any, name: str) -> None:
    """Every weight stays, and is what a fresh load has; with a rate, the control, they move."""
    told = found[name]["still"]
    compared, unequal, norm = told["0.0"]
    assert compared > 10_000 and unequal == 0 and norm > 0
    assert told["same"] == [compared, 0]
    assert told["0.001"][1] > compared / 2


def test_recipe_finds_the_engine(child: Child, checkpoints: Path) -> None:
    """verl's PPO recipe with model_engine=unified, and nothing of ours imported before."""
    told = child("child_recipe.py", checkpoints / "nemotron_h", modules="")
    assert told == {
        "strategy": "unified",
        "engine": ["unified_models.adapters.verl.engine", "report", "vllm_v2"],
        "ref": ["UnifiedEngineConfig", True, "vllm_v2"],
        "optimizer": "FSDPOptimizerConfig",
        "critic": "verl.workers.config.FSDPCriticConfig",
        "rollout": [
            *("vllm", True, "auto", "processed_logprobs", True, False),
            {"config_format": "unified", "compilation_config": {"cudagraph_mode": "NONE"}},
        ],
    }


def test_training_worker(child: Child, checkpoints: Path) -> None:
    """verl's worker, dynamic micro-batches, two mini-batches: the second is compared by its recomputed logprobs."""
    told = child("child_workers.py", "worker", checkpoints)
    assert "sequence 1, response token 0" in told["fault"]
    assert told["after_fault"][0] > 0 and told["after_fault"][1] == 0
    metrics = told["metrics"]
    assert metrics["bits/compared"] == [13, 17] and metrics["bits/unequal"] == [0, 0]
    assert metrics["actor/ppo_kl"][0] == 0 != metrics["actor/ppo_kl"][1]
    compared, unequal = told["after"]
    assert unequal > compared / 2
    assert told["reset"] == told["loaded"] == [compared, 0]


def test_two_processes(child: Child, checkpoints: Path) -> None:
    """Masters cut over two processes: the bits and the gradient's norm of one; both stop; a resume is exact."""
    told = child("child_workers.py", "processes", checkpoints)
    assert told["outputs"][0] > 2 * SAMPLED and told["outputs"][1] == 0
    one, *two = told["norms"]
    assert two[0] == two[1] == pytest.approx(one, rel=1e-4)
    assert told["bits"] == [[SCORED, 0]] * 3
    others, own = told["faults"]
    assert f"1 of {SCORED} response tokens" in others and "another process" in others
    assert f"1 of {SCORED} response tokens" in own and "sequence 0, response token 0" in own
    for first, after, (norm, again) in told["resumed"]:
        assert first[0] > 0 and after[0] > 0 and first[1] == after[1] == 0
        assert norm == again
    assert told["sent"][0] > 10_000 and told["sent"][1] == 0
    assert told["served"][0] > 0 and told["served"][1] == 0


@pytest.mark.vllm
@each
def test_loop_over_vllm(
    child: Child, checkpoints: Path, serving: dict[str, Any], name: str
) -> None:
    """verl's vLLM worker, its weight transfer in buckets, its debug metrics and loss, around real vLLM and our engine:
    no unequal bit in any round. An update that was not sent, and one that did not end, are refused."""
    told = child("child_rollout.py", serving["site"], checkpoints / name, **serving["how"])
    for found in told["rounds"]:
        assert found["debug"] == [1, 0, 0, 0, 0]
        assert found["bits"] == [found["tokens"] - 2, 0] and found["tokens"] == SAMPLED
        assert found["moved"][1] > found["moved"][0] / 2
    assert told["stale"].startswith("UnequalError:")
    assert told["fault"].startswith("UnequalError:"), "one ulp in vLLM's norms"
    assert "response tokens have other bits in the training forward" in told["fault"]
    assert "tensors of the new weights have not come" in told["unfinished"]
