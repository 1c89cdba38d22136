"""Pages of scan states in the engine: prefixes, preemption, waiting, updates, and pages that hold something else.

The models of conftest.py, compared with the training forward. Test names end with the row of the field cases.
"""

from typing import Any

import pytest
import torch

import unified_models as um


def test_only_complete_chunks_are_reused_D05(hybrid: Any) -> None:
    """A prompt of 300 tokens in pieces of 187 and 113: after the first piece, its whole chunks are there, not 187."""
    Q, given = hybrid.Q, hybrid.prompts(300) * 2
    engine = hybrid.engine(step_tokens=187)
    requests = [engine.submit(given[0], um.Sampling(max_tokens=4))]
    engine.step()
    assert requests[0].computed == 187
    requests.append(engine.submit(given[1], um.Sampling(max_tokens=4)))
    engine.step()
    assert engine.stats.prefix_hits == 187 // Q * Q
    engine.run()
    assert hybrid.check(given, [request.output() for request in requests]) == 8


@pytest.mark.parametrize("page_tokens", [1, 2, 8, 16])
def test_pages_other_than_chunks_D07(hybrid: Any, page_tokens: int) -> None:
    """A state is published at multiples of the chunk, whatever the attention's pages are."""
    Q, given = hybrid.Q, hybrid.prompts(2 * hybrid.Q + 45)
    engine = hybrid.engine(page_tokens=page_tokens, step_tokens=90)
    for _ in range(2):
        assert hybrid.check(given, engine.generate(given, um.Sampling(max_tokens=4))) == 4
    assert engine.stats.prefix_hits == (2 * Q + 44) // Q * Q


def test_pages_across_chunks_are_refused_D07(hybrid: Any) -> None:
    Q = hybrid.Q
    with pytest.raises(ValueError, match=rf"{3 * Q} tokens \(page_tokens\), but .* chunk of {Q}"):
        hybrid.engine(page_tokens=3 * Q)


@pytest.mark.parametrize("more", [4, 7, 10])
def test_past_a_boundary_D08(hybrid: Any, bits: Any, more: int) -> None:
    """A ends a few tokens past a boundary; B repeats it, and C goes on from its answer, twice: as in a cold engine."""
    Q, sampling = hybrid.Q, um.Sampling(max_tokens=6, seed=5)
    a, rest = hybrid.prompts(2 * Q + more, Q)
    engine = hybrid.engine()
    (first,) = engine.generate([a], sampling)
    given, outs, hits = [a], [first], [0]
    for prompt in (a, [*a, *first.ids, *rest], [*a, *first.ids, *rest]):
        before = engine.stats.prefix_hits
        given.append(prompt)
        outs += engine.generate([prompt], sampling)
        hits.append(engine.stats.prefix_hits - before)
    assert hits == [0, 2 * Q, 2 * Q, 3 * Q]
    assert [out.ids for out in (outs[1], outs[3])] == [first.ids, outs[2].ids]
    (cold,) = um.Engine(hybrid.model, prefix_cache=False).generate(given[3:], sampling)
    assert bits(outs[3].logprobs, cold.logprobs) == 6
    assert hybrid.check(given, outs) == 24


def test_sampled_tokens_complete_a_chunk_D08(hybrid: Any) -> None:
    """A prompt three tokens short of a boundary: the chunk that its answer fills is reused like any other."""
    Q, engine = hybrid.Q, hybrid.engine()
    (a,) = hybrid.prompts(2 * Q - 3)
    (first,) = engine.generate([a], um.Sampling(max_tokens=9))
    c = [*a, *first.ids, 9, 8, 7]
    outs = engine.generate([c], um.Sampling(max_tokens=5))
    assert engine.stats.prefix_hits == 2 * Q
    assert hybrid.check([a, c], [first, *outs]) == 14


def test_many_share_state_pages(hybrid: Any) -> None:
    """Six prompts with the same two chunks at their beginning, at once: they read one page of states."""
    Q = hybrid.Q
    (common,) = hybrid.prompts(2 * Q)
    given = [[*common, *([i] * (3 + i))] for i in range(6)]
    engine = hybrid.engine(step_tokens=100)
    assert hybrid.check(given[:1], engine.generate(given[:1], um.Sampling(max_tokens=2))) == 2
    requests = [engine.submit(p, um.Sampling(max_tokens=20), i) for i, p in enumerate(given)]
    engine.step()
    (store, _) = engine._memory.states.values()
    assert len(engine.running) == 6 and max(store.table.pool.users) == 6
    engine.run()
    assert engine.stats.prefix_hits == 6 * 2 * Q
    assert hybrid.check(given, [request.output() for request in requests]) == 6 * 20
    assert hybrid.idle(engine)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_requests_wait_for_a_state_D23(hybrid: Any, prefix_cache: bool) -> None:
    """Three requests, two places: the third waits until one leaves. Nobody is preempted for it."""
    given = hybrid.prompts(20, 50, 35)
    engine = hybrid.engine(state_slots=2, prefix_cache=prefix_cache)
    lengths = (5, 20, 8)
    requests = [
        engine.submit(prompt, um.Sampling(max_tokens=n), i)
        for i, (prompt, n) in enumerate(zip(given, lengths, strict=True))
    ]
    most = 0
    while engine.step():
        most = max(most, len(engine.running))
        if not (requests[0].done or requests[1].done):
            assert requests[2].state == "waiting"
    assert most == 2
    assert (engine.stats.waited_for_state, engine.stats.preemptions) == (1, 0)
    assert hybrid.check(given, [request.output() for request in requests]) == 33
    assert "state_slots=2" in repr(engine) and hybrid.idle(engine)


def test_preempted_with_an_open_chunk_B11(hybrid: Any) -> None:
    """In the middle of the prompt and of the answer, at no multiple of the chunk: as if nothing had been."""
    given, Q = hybrid.prompts(hybrid.Q + 39, 40), hybrid.Q
    engine = hybrid.engine(step_tokens=61)
    requests = [engine.submit(p, um.Sampling(max_tokens=12), i) for i, p in enumerate(given)]
    preempted = 0
    while engine.step():
        request = requests[0]
        if (
            request.state == "running"
            and preempted < 3
            and request.computed % Q
            and (not preempted or len(request.logprobs) > 3 * preempted)
        ):
            engine._scheduler._preempt(request)
            preempted += 1
    assert preempted == engine.stats.preemptions == 3
    assert hybrid.check(given, [request.output() for request in requests]) == 24
    assert engine.stats.tokens_recomputed > 0 and hybrid.idle(engine)


def test_aborted_requests_free_their_pages(hybrid: Any) -> None:
    given = hybrid.prompts(200, 30, 75)
    engine = hybrid.engine(step_tokens=50, prefix_cache=False)
    requests = [engine.submit(p, um.Sampling(max_tokens=9), i) for i, p in enumerate(given)]
    engine.step()
    engine.abort(requests[0])
    engine.abort(requests[2])
    engine.run()
    assert [request.reason for request in requests] == ["aborted", "length", "aborted"]
    assert hybrid.check(given[1:2], [requests[1].output()]) == 9
    assert hybrid.idle(engine)
    assert all((store.held_P2 == -1).all() for store in engine._memory.states.values())


def test_a_page_of_another_place_is_refused_D07_D08(hybrid: Any) -> None:
    """While a request runs, its boundary page is swapped for a copy of the same bytes: refused, not used."""
    engine = hybrid.engine()
    request = engine.submit(hybrid.prompts(hybrid.Q + 39)[0], um.Sampling(max_tokens=9))
    while not request.logprobs:
        engine.step()
    store = next(iter(engine._memory.states.values()))
    pages, boundary = store.table.pages_SK[request.seat], request.computed // store.slot.chunk - 1
    spare = store.table.pool.take()
    store.data_PX[spare] = store.data_PX[pages[boundary]]
    pages[boundary] = spare
    with pytest.raises(RuntimeError, match=rf"blocks\.0\.mixer\.state: page {spare} holds -1 rows"):
        engine.step()


@pytest.mark.parametrize("layer", [3, 5])
def test_an_interrupted_step_runs_again(hybrid: Any, layer: int) -> None:
    """A prompt, an answer and a filled chunk are each interrupted between two layers, some states being written."""
    engine = hybrid.engine(step_tokens=50)
    given = hybrid.prompts(hybrid.Q + 39, 2 * hybrid.Q - 3)
    requests = [engine.submit(p, um.Sampling(max_tokens=9), i) for i, p in enumerate(given)]
    stops = iter([True, False, True] * 40)

    def stop(module: Any, args: Any) -> None:
        if next(stops):
            raise KeyboardInterrupt

    handle = hybrid.model.blocks[layer].register_forward_pre_hook(stop)
    interrupted = 0
    try:
        while any(not request.done for request in requests):
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        handle.remove()
    assert interrupted > 10
    assert hybrid.check(given, [request.output() for request in requests]) == 18
    assert hybrid.idle(engine)


def test_updates_while_requests_run_A31(hybrid: Any, hybrid_of: Any, bits: Any) -> None:
    """Each sampled token has the bits of the training forward of its version; scales of inputs and caches are part of
    an update."""
    hybrid = hybrid_of(hybrid.Q, hybrid.mixed)
    models = (hybrid.model, hybrid.build(seed=1))
    weights = [[(n, t.clone()) for n, t in um.named_tensors(m)] for m in models]
    engine = hybrid.engine(step_tokens=32)
    given = hybrid.prompts(hybrid.Q + 39, 7)
    requests = [engine.submit(p, um.Sampling(max_tokens=14), i) for i, p in enumerate(given)]
    for version in (1, 2):
        count = len(requests[0].logprobs)
        while len(requests[0].logprobs) < count + 4:
            engine.step()
        engine.update_weights(weights[version % 2])
        assert engine._memory.used_pages == 0
    engine.run()
    outs = [request.output() for request in requests]
    assert engine.stats.tokens_recomputed > 0
    compared = 0
    for version in (0, 1, 2):
        um.Engine(hybrid.model).update_weights(weights[version % 2])
        for out, lps in zip(outs, hybrid.trained(given, outs), strict=True):
            mine = torch.tensor(out.versions) == version
            compared += bits(out.logprobs[mine], lps[mine]) if mine.any() else 0
    assert compared == 28
    assert set(outs[0].versions) == {0, 1, 2}
