"""Packs and batches of a whole small model: empty sequences, batch sizes, and heads that are not tied."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import unified_models as um
from unified_models import verify

MIXED = Path(__file__).parent.parent / "configs/tiny/nemotron_h_mixed.json"
MODELS = {
    "deepseek_v4": {"num_hidden_layers": 4, "compress_ratios": [0, 4, 8, 4], "num_hash_layers": 2},
    "nemotron_h": {"config": MIXED},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("packs") / request.param
    um.make_tiny(request.param, folder, seed=3, **MODELS[request.param])
    return folder


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0, 0), (1, 0, 9, 0, 0, 2)], ids=str)
def test_empty_sequences_take_nothing_of_their_neighbours_F02(folder, lengths):
    model = um.load(folder)
    sequences = [[(7 * i + 3 * j) % 512 for j in range(n)] for i, n in enumerate(lengths)]
    packed = um.logprobs(model, sequences)
    alone = [um.logprobs(model, [sequence])[0] for sequence in sequences]
    assert [len(values) for values in packed] == [max(n - 1, 0) for n in lengths]
    compared = verify.bits(packed, alone)
    assert compared.unequal == 0 and compared.compared == sum(max(n - 1, 0) for n in lengths)
    assert [len(v) for v in um.Engine(model).score(sequences)] == [len(v) for v in packed]


def test_a_document_leaves_nothing_to_the_next_F01(folder):
    """1, 0, 129 and 3 tokens in one pack: each as alone, whatever is in front of it, in values and gradients."""
    model = um.load(folder)
    documents = [
        [(11 * i + 5 * j + 3) % 512 for j in range(n)] for i, n in enumerate((1, 0, 129, 3))
    ]
    others = [[9], [], [(i * i) % 512 for i in range(129)], documents[3]]
    packed, changed = um.logprobs(model, documents), um.logprobs(model, others)
    alone = [um.logprobs(model, [document])[0] for document in documents]
    compared = verify.bits(packed, alone)
    assert (compared.unequal, compared.compared) == (0, 128 + 2)
    assert verify.bits(packed[3:], changed[3:]).unequal == 0
    assert verify.bits(packed[2:3], changed[2:3]).unequal > 0, "the control"
    grads = []
    for values in (packed[3], changed[3], alone[3]):
        model.zero_grad()
        values.sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) > 20 and sum(grad.count_nonzero() for grad in grads[0]) > 1000
    for one, other in zip(grads[0], grads[1], strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(grads[0], grads[2], strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_a_pack_with_empty_sequences_F02(folder):
    model = um.load(folder)
    sequences = [[], [5, 9, 200, 31], [], [77]]
    torch.cat(um.logprobs(model, sequences)).sum().backward()
    packed = {path: w.master.grad for path, w in model.weights() if w.master.requires_grad}
    assert all(grad is not None and grad.isfinite().all() for grad in packed.values())
    model.zero_grad()
    um.logprobs(model, [sequences[1]])[0].sum().backward()
    for path, weight in model.weights():
        if path in packed:
            torch.testing.assert_close(packed[path], weight.master.grad, msg=path)


def test_greedy_does_not_depend_on_the_batch_B15(folder):
    """12 and 16 requests at a time, long enough for every kind of layer to reach far back."""
    model = um.load(folder)
    prompts = [[(31 * i + 7 * j) % 512 for j in range(150 + i)] for i in range(16)]
    sampling = um.Sampling(max_tokens=40, temperature=0)
    sixteen = um.Engine(model, max_sequences=16).generate(prompts, sampling)
    twelve = um.Engine(model, max_sequences=12).generate(prompts[:12], sampling)
    assert [out.ids for out in twelve] == [out.ids for out in sixteen[:12]]
    compared = verify.bits([o.logprobs for o in twelve], [o.logprobs for o in sixteen[:12]])
    assert compared.unequal == 0 and compared.compared == 12 * 40


def test_a_tied_head_is_refused_with_both_values_A30(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "tied")
    config = json.loads((tmp_path / "tied/config.json").read_text())
    (tmp_path / "tied/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match="tie_word_embeddings = True; only False"):
        um.load(tmp_path / "tied")


def test_head_and_embedding_are_two_storages_A30(folder):
    model = um.load(folder)
    assert model.head.master.data_ptr() != model.embed.master.data_ptr()
    before = model.embed.master.clone()
    model.head.assign(torch.zeros_like(model.head.master))
    assert torch.equal(model.embed.master, before)
