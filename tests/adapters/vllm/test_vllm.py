"""Real vLLM runs our definitions, and reports logprobs with the bits of the training forward."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch

import unified_models as um
from unified_models.verify.compare import Comparison, bits

pytestmark = pytest.mark.vllm
CONFIGS = Path(__file__).parents[3] / "configs/tiny"
Child = Callable[..., Any]
Checkpoint = Callable[[str], Path]


def sampled(
    folder: Path, outs: Sequence[Any], temperature: float = 0.7, provider: str = "torch_row"
) -> Comparison:
    """The logprobs of sampled tokens against the training forward."""
    model = um.load(folder)
    whole = [[*out["prompt"], *out["ids"]] for out in outs]
    with torch.no_grad():
        again = um.logprobs(model, whole, temperature, provider=provider)
    told = [torch.tensor(out["logprobs"], dtype=torch.float32) for out in outs]
    return bits(told, [lp[len(out["prompt"]) - 1 :] for lp, out in zip(again, outs, strict=True)])


@pytest.mark.slow(120)
@pytest.mark.parametrize("name", ["deepseek_v4", "nemotron_h"])
def test_rollouts_under_load_have_the_trainers_bits(
    checkpoint: Checkpoint, surroundings: Any, tmp_path: Path, name: str
) -> None:
    """B01 B02 B03 B11: 16 at a time, 16 tokens a step, little memory, shared beginnings, two updates of the weights
    while requests run, T = 0.7; each token under the weights that sampled it, against training and our engine."""
    told = tmp_path / "report.json"
    command = [str(Path(sys.executable).with_name("unified-models")), "verify"]
    command += [str(checkpoint(name)), "--against", "vllm", "--json", str(told)]
    done = subprocess.run(command, env=surroundings(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads(told.read_text())
    assert report["ok"] and not report["problems"]
    for side in ("trained", "served"):
        compared = [row["compared"] for row in report[side]]
        assert len(compared) == 3 and min(compared) >= 500 and sum(compared) >= 5000
        assert [row["unequal"] for row in report[side]] == [0, 0, 0]
    assert report["preemptions"] > 0 and report["cached"] > 0


@pytest.mark.slow
def test_v1_runner_and_prompt_logprobs(checkpoint: Checkpoint, child: Child) -> None:
    """Prompt logprobs are at T = 1 whatever the request's temperature."""
    folder = checkpoint("nemotron_h")
    found = child("ours", folder)
    assert found["runner"] == "vllm.v1.worker.cpu_model_runner"
    compared = sampled(folder, found["outs"])
    assert (compared.compared, compared.unequal) == (96, 0)
    groups = found["groups"]
    assert sum(group["caches"] for group in groups) == 3, (
        "two scans, each with the rows of its convolution, and one attention"
    )
    assert len({group["block"] for group in groups}) == 1, "all blocks are of one size"
    assert all(group["lost"] == group["block"] - group["used"] >= 0 for group in groups)
    assert min(group["lost"] for group in groups) == 0, "the widest group sets it"
    prompts = [{**o, "ids": [], "logprobs": o["prompt_logprobs"]} for o in found["outs"]]
    model = um.load(folder)
    with torch.no_grad():
        again = um.logprobs(model, [o["prompt"] for o in prompts])
    told = [torch.tensor(o["logprobs"], dtype=torch.float32) for o in prompts]
    whole = bits(told, again)
    assert whole.compared > 200 and whole.unequal == 0
    flipped = [told[0].clone().view(torch.int32) ^ 1, *(t.view(torch.int32) for t in told[1:])]
    control = bits([t.view(torch.float32) for t in flipped], again)
    assert control.unequal == len(told[0]), "the control: one ulp is seen"


@pytest.mark.slow
def test_prompts_of_awkward_lengths_B12_B13_B14_G08(checkpoint: Checkpoint, child: Child) -> None:
    """Around pages and chunks, up to the model's limit: every prompt logprob; no prefix cache where it is off."""
    folder = checkpoint("nemotron_h")
    found = child("lengths", folder)
    model = um.load(folder)
    for outs in found["outs"]:
        assert [out["cached"] for out in outs] == [0] * len(outs)
        compared = sampled(folder, outs)
        assert (compared.compared, compared.unequal) == (len(outs), 0)
        with torch.no_grad():
            again = um.logprobs(model, [out["prompt"] for out in outs])
        whole = bits(
            [torch.tensor(out["prompt_logprobs"], dtype=torch.float32) for out in outs], again
        )
        assert whole.compared == sum(len(out["prompt"]) - 1 for out in outs) > 2000
        assert whole.unequal == 0
    assert "512" in found["told"], found["told"]


@pytest.mark.slow
def test_v2_runner_has_its_own_sum(checkpoint: Checkpoint, child: Child) -> None:
    """vLLM's other runner adds a row of the vocabulary in another order: the trainer takes it as the provider."""
    folder = checkpoint("nemotron_h")
    found = child("v2_runner", folder)
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    compared = sampled(folder, found["outs"], provider="vllm_v2")
    assert compared.compared >= 200 and compared.unequal == 0
    assert sampled(folder, found["outs"]).unequal > 0, "the control: the other provider differs"


@pytest.mark.slow
def test_engine_core_in_a_process_of_its_own_G01(checkpoint: Checkpoint, child: Child) -> None:
    """The plugin is found in every process."""
    folder = checkpoint("qwen3")
    found = child("ours", folder, VLLM_ENABLE_V1_MULTIPROCESSING="1")
    compared = sampled(folder, found["outs"])
    assert (compared.compared, compared.unequal) == (96, 0)


@pytest.mark.slow
def test_our_class_means_what_vllms_own_means(checkpoint: Checkpoint, child: Child) -> None:
    """Dense Qwen3 in float32: 16 prompts within 1e-4; vLLM's own class is untouched before and after."""
    found = child("both_classes", checkpoint("qwen3"))
    own, our, again = found["kinds"]
    assert own == again == "vllm.model_executor.models.qwen3"
    assert our == "unified_models.adapters.vllm.model"
    pairs = [
        (a, b)
        for x, y in zip(found["theirs"], found["ours"], strict=True)
        for a, b in zip(x["prompt_logprobs"], y["prompt_logprobs"], strict=True)
    ]
    assert len(found["ours"]) == 16 and len(pairs) > 300
    assert max(abs(a - b) for a, b in pairs) < 1e-4


@pytest.mark.slow
def test_reloads_change_weights_in_place_A23_A25_A26_A27(
    checkpoint: Checkpoint, child: Child
) -> None:
    """Another checkpoint by vLLM's own reload, and the first one again: each has the bits of a fresh process, and no
    tensor that the forward reads has moved."""
    folder = checkpoint("nemotron_h")
    other = folder.with_name(f"{folder.name}-other")
    um.make_tiny("nemotron_h", other, seed=9, config=CONFIGS / "nemotron_h_mixed.json")
    found = child("reload", folder)
    for outs, path in zip(found["outs"], (folder, other, folder), strict=True):
        compared = sampled(path, outs)
        assert (compared.compared, compared.unequal) == (48, 0), path
    first, *later = found["pointers"]
    assert len(first) > 50 and all(pointers == first for pointers in later)
    assert sampled(other, found["outs"][0]).unequal > 0, "the control: other weights, other bits"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "nemotron_h"])
def test_pages_of_other_weights_are_not_used_A31(
    checkpoint: Checkpoint, child: Child, name: str
) -> None:
    """A reload whose caller forgot to drop the prefix cache: refused, not answered from old pages."""
    found = child("stale", checkpoint(name))
    assert sampled(checkpoint(name), found["before"]).unequal == 0
    reason = "holds -1 rows" if name == "nemotron_h" else "prefix cache must be dropped"
    assert reason in found["told"], found["told"]


@pytest.mark.slow
def test_requests_that_hit_pages_of_their_own_step(checkpoint: Checkpoint, child: Child) -> None:
    """vLLM counts a page as a prefix hit in the step that fills it: a group of equal prompts is such a case."""
    folder = checkpoint("nemotron_h")
    outs = child("together", folder)["outs"]
    assert sum(out["cached"] for out in outs) >= 3 * 16, [out["cached"] for out in outs]
    model = um.load(folder, progress=False)
    trained = um.logprobs(model, [out["prompt"] + out["ids"] for out in outs], 0.7)
    told = um.verify.bits(
        [torch.tensor(out["logprobs"], dtype=torch.float32) for out in outs],
        [lp[len(out["prompt"]) - 1 :] for lp, out in zip(trained, outs, strict=True)],
    )
    assert (told.compared, told.unequal) == (7 * 5, 0)


@pytest.mark.slow
def test_settings_that_are_not_exact_are_refused_A19_A20_B10_B17(
    checkpoint: Checkpoint, child: Child
) -> None:
    """In one line each, at the start."""
    told = child("refused_settings", checkpoint("nemotron_h"))
    for name, reason in {
        "tensor_parallel_size": "tensor_parallel_size must be 1",
        "data_parallel_size": "data_parallel_size",
        "routes": "the experts of a token are not returned",
        "speculative": "speculative decoding is not exact yet, got 'ngram'",
        "lora": "LoRA adds to products outside our operators",
        "logprobs_mode": "logprobs_mode must be 'processed_logprobs', got 'raw_logits'",
        "logits_processors": "logits processors change the distribution",
        "numerics": "numerics must be one of ('deployed', 'float32'), got 'float16'",
        "block_size": "block_size 48 does not divide the scan's chunk of 16",
        "compile": "mode must be left unset: torch.compile keeps float32",
        "graphs": "cudagraph_mode must be of ('NONE', 'FULL', 'FULL_DECODE_ONLY'): pieces are cut by torch",
        "dummy": "load_format must be 'auto': the number formats of weights are read from the checkpoint",
    }.items():
        assert reason in told[name], (name, told[name])


@pytest.mark.slow
def test_other_configs_are_answered_by_our_reader_G03(
    checkpoint: Checkpoint, child: Child, tmp_path: Path
) -> None:
    """Not by "upgrade your library": the file, the key, and what is known."""
    folder = tmp_path / "foreign"
    shutil.copytree(checkpoint("qwen3"), folder)
    told = child("foreign", folder)
    assert "'nonsense'" in told["nonsense"] and "nemotron_h" in told["nonsense"]
    assert (
        "unknown key 'hiden_size'" in told["unknown key"] and "config.json" in told["unknown key"]
    )
    assert "missing key 'model_type'" in told["no model_type"]


@pytest.mark.slow
def test_requests_that_change_the_distribution_are_refused(
    checkpoint: Checkpoint, child: Child
) -> None:
    folder = checkpoint("nemotron_h")
    found = child("refused_requests", folder)
    assert found["told"].pop("seed").startswith("seed = 1: vLLM on CPU fails on a seeded request")
    for name, reason in found["told"].items():
        assert reason.startswith(f"{name} = ") and "changes the distribution" in reason, name
    compared = sampled(folder, found["greedy"], temperature=1.0)
    assert (compared.compared, compared.unequal) == (4, 0), "greedy is T = 1"


@pytest.mark.slow
def test_batches_keep_no_lists_of_tokens_for_the_checks(
    checkpoint: Checkpoint, child: Child
) -> None:
    """A list of sampled tokens that nothing reads would have the GPU's runner wait in every step. Requests are still
    checked, a caller's extension is still there, and a worker that a caller named is his."""
    folder = checkpoint("nemotron_h")
    found = child("workers", folder)
    ours = "unified_models.adapters.vllm.worker.UnifiedWorker"
    theirs = "vllm.v1.worker.cpu_worker.CPUWorker"
    for name, (first, lists) in {
        "ours": (ours, 0),
        "extended": (ours, 0),
        "theirs": (theirs, 3),
    }.items():
        one = found[name]
        assert one["workers"][0] == first and theirs in one["workers"], name
        assert (one["asked"], one["told"], one["checks"]) == (lists > 0, lists, 1), name
        assert one["groups"] > 1, "the batch was made anew for the groups of caches"
        assert one["refused"].startswith("top_p = 0.9"), one["refused"]
        compared = sampled(folder, one["outs"])
        assert (compared.compared, compared.unequal) == (24, 0), name
    assert found["extended"]["extension"] == "of UnifiedWorker"


@pytest.mark.slow
def test_server_reports_the_same_bits(
    checkpoint: Checkpoint, surroundings: Any, tmp_path: Path
) -> None:
    """`vllm serve` and completions over HTTP."""
    folder, port = checkpoint("qwen3"), free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--config-format", "unified"]
    command += ["--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--block-size", "16", "--served-model-name", "tiny"]
    env = surroundings(TORCHDYNAMO_DISABLE="1")
    told = tmp_path / "server.log"
    with (
        told.open("w") as log,
        subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT) as server,
    ):
        try:
            wait_for(server, f"http://127.0.0.1:{port}/health", told)
            outs = [complete(port, prompt) for prompt in ([1, 2, 3], list(range(40, 90)))]
        finally:
            server.terminate()
    compared = sampled(folder, outs)
    assert (compared.compared, compared.unequal) == (24, 0)


@pytest.mark.slow
def test_readme_example(vllm: str, surroundings: Any, tmp_path: Path) -> None:
    """As written; then its logprobs are compared."""
    page = (Path(__file__).parents[3] / "README.md").read_text()
    _, example, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    um.make_tiny("nemotron_h", tmp_path / "tiny/nemotron", seed=0)
    program = tmp_path / "example.py"
    program.write_text(
        "import json\n\nif __name__ == '__main__':\n"
        + "".join(f"    {line}\n" for line in example.splitlines())
        + "    done = out.outputs[0]\n"
        + "    rows = zip(done.logprobs, done.token_ids)\n"
        + "    lps = [row[token].logprob for row, token in rows]\n"
        + "    told = {'prompt': [1, 2, 3], 'ids': list(done.token_ids), 'logprobs': lps}\n"
        + "    json.dump(told, open('found.json', 'w'))\n"
    )
    env = surroundings(TORCHDYNAMO_DISABLE="1")
    command = [sys.executable, str(program)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    compared = sampled(tmp_path / "tiny/nemotron", [found])
    assert compared.compared == len(found["ids"]) > 0 and compared.unequal == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until the server answers; its log if it ends first."""
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-4000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"no answer in four minutes: {log.read_text()[-4000:]}")


def complete(port: int, prompt: list[int]) -> dict[str, Any]:
    """One completion; its tokens by number."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 12,
        "temperature": 0.7,
        "logprobs": 0,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        (choice,) = json.load(answer)["choices"]
    told = choice["logprobs"]
    ids = [int(token.removeprefix("token_id:")) for token in told["tokens"]]
    return {"prompt": prompt, "ids": ids, "logprobs": told["token_logprobs"]}
