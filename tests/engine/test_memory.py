"""Pages, tables and the prefix index, and a fuzz over all that can happen to an engine."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unified_models.engine import Engine, Request, Sampling, prefix
from unified_models.engine.pool import PagePool
from unified_models.engine.states import NOTHING
from unified_models.engine.table import PageTable


def test_pool_takes_free_pages_then_the_oldest_named() -> None:
    pool = PagePool(3)
    a, b, c = pool.take(), pool.take(), pool.take()
    assert (pool.available, pool.used) == (0, 3)
    pool.name(a, b"a")
    pool.name(b, b"b")
    pool.release(b)
    pool.release(a)
    pool.release(c)
    assert pool.available == 3
    assert pool.take() == c and pool.take() == b
    assert pool.find(b"b") is None and pool.find(b"a") == a
    pool.share(a)
    assert pool.available == 0


def test_pool_keeps_shared_pages() -> None:
    pool = PagePool(2)
    a = pool.take()
    pool.name(a, b"a")
    pool.share(a)
    pool.release(a)
    assert pool.used == 1
    pool.forget()
    assert pool.find(b"a") is None and pool.used == 1
    pool.release(a)
    assert pool.available == 2


def test_pool_keeps_the_first_page_of_a_name() -> None:
    pool = PagePool(2)
    a, b = pool.take(), pool.take()
    pool.name(a, b"x")
    pool.name(b, b"x")
    pool.release(b)
    assert pool.find(b"x") == a
    assert pool.take() == b


@pytest.mark.parametrize("keep", [1, 2, 16, 17, 18, 33])
def test_table_holds_exactly_the_window(keep: int) -> None:
    """After every length: the pages that the next token reads are held, older ones are not."""
    pool = PagePool(100)
    table = PageTable(pool, 16, keep, seats=1, most_tokens=1600)
    for tokens in range(1, 200):
        table.grow(0, tokens)
        table.trim(0, tokens)
        first = max(0, tokens - keep + 1) // 16
        assert pool.used == -(-tokens // 16) - first
        held = [int(table.pages_SK[0, k]) for k in range(first, -(-tokens // 16))]
        assert all(pool.users[page] == 1 for page in held)
    table.clear(0)
    assert pool.used == 0


def test_c21_hit_length_rule() -> None:
    """Full pages up to the last complete block; the window's pages where it slides; entries by whole windows."""
    full = PageTable(PagePool(20), 16, None, seats=2, most_tokens=320)
    near = PageTable(PagePool(20), 16, 20, seats=2, most_tokens=320)
    wide = PageTable(PagePool(20), 64, None, seats=2, most_tokens=320)
    tokens, digests = list(range(100)), []
    prefix.extend(digests, tokens, 100, 16, 0)
    assert len(digests) == 6
    for table in (full, near, wide):
        for end in range(20, 101, 20):
            table.grow(0, end)
            table.name(0, end, digests, 16)
            table.trim(0, end)
    tables = (full, near, wide)
    hits = [prefix.longest(tables, digests, 16, limit) for limit in (0, 15, 16, 63, 64, 95, 96, 99)]
    assert hits == [0, 0, 16, 48, 64, 80, 96, 96]
    near.clear(0)
    page = near.pool.find(digests[4])
    assert page is not None
    for _ in range(near.pool.available):  # evicts all
        near.pool.take()
    assert prefix.longest(tables, digests, 16, 99) == 0
    assert prefix.longest((full, wide), digests, 16, 99) == 96


def test_prefix_names_depend_on_all_tokens_and_the_version() -> None:
    def names(tokens: list[int], version: int = 0) -> list[bytes]:
        out: list[bytes] = []
        prefix.extend(out, tokens, len(tokens), 4, version)
        return out

    base = names(list(range(12)))
    assert len(set(base)) == 3
    assert names([9, *range(1, 12)])[2] != base[2]
    assert names(list(range(12)), 1)[0] != base[0]
    assert names(list(range(11))) == base[:2]


def test_poison_reaches_every_free_page(trial: Any) -> None:
    engine = trial.engine(poison=True, prefix_cache=False, cache_tokens=64)
    engine.generate(trial.prompts(40, 20), Sampling(max_tokens=4))
    assert engine._memory.stores
    for store in engine._memory.stores.values():
        assert store.data_RB.numel() and bool((store.data_RB == 0xFF).all())
    assert torch.full((4,), 0xFF, dtype=torch.uint8).view(torch.float32).isnan().all()


def check_pages(engine: Engine) -> None:
    """The users of each page are the seats that hold it; a sliding table holds no more than its window."""
    for table in engine._memory.tables.values():
        users = [0] * table.pool.num_pages
        for held in table._held:
            for page in held:
                users[page] += 1
        assert users == table.pool.users
        free = table.pool._free
        idle = list(table.pool._idle)
        assert len(set(free)) == len(free)
        assert sorted([*free, *idle, *(p for p, n in enumerate(users) if n)]) == list(
            range(len(users))
        )
    for store in engine._memory.states.values():
        assert (store.held_P2[store.table.pool._free] == NOTHING).all()
        assert len(engine.running) <= (engine._memory.state_slots or 0)


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 90), st.integers(0, 2), st.integers(1, 40)),
    st.tuples(st.just("score"), st.integers(2, 120), st.integers(0, 2)),
    st.tuples(st.just("steps"), st.integers(1, 12)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("commit"), st.integers(1, 5)),
)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    actions=st.lists(ACTIONS, min_size=4, max_size=16),
    step_tokens=st.sampled_from([1, 7, 16, 50]),
    max_sequences=st.sampled_from([1, 3, 8]),
    page_tokens=st.sampled_from([4, 16, 32]),
    cache_tokens=st.sampled_from([130, 200, 400]),
    prefix_cache=st.booleans(),
)
def test_b11_fuzz(trial: Any, bits: Any, actions: list[Any], **options: Any) -> None:
    fuzz(trial, bits, actions, options)


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    actions=st.lists(ACTIONS, min_size=4, max_size=16),
    step_tokens=st.sampled_from([1, 7, 50, 300]),
    max_sequences=st.sampled_from([1, 3, 8]),
    page_tokens=st.sampled_from([4, 16, 32]),
    cache_tokens=st.sampled_from([130, 200, 400]),
    state_slots=st.sampled_from([1, 2, 8]),
    prefix_cache=st.booleans(),
)
def test_b11_fuzz_with_states(
    scan_trial: Any, bits: Any, actions: list[Any], **options: Any
) -> None:
    fuzz(scan_trial, bits, actions, options)


def fuzz(trial: Any, bits: Any, actions: list[Any], options: dict[str, Any]) -> None:
    """Submit, score, step, abort and commit in any order: bits, page counts and versions stay right."""
    trial.model.salt.assign(torch.tensor([3.0]))
    engine = trial.engine(poison=True, **options)
    salts = [3.0]
    requests: list[Request] = []
    for kind, *numbers in actions:
        if kind == "submit":
            (prompt,) = trial.prompts(numbers[0], offset=numbers[1])
            requests.append(engine.submit(prompt, Sampling(max_tokens=numbers[2], seed=numbers[1])))
        elif kind == "score":
            requests.append(engine.submit_score(trial.prompts(numbers[0], offset=numbers[1])[0]))
        elif kind == "abort" and requests:
            engine.abort(requests[numbers[0] % len(requests)])
        elif kind == "commit":
            trial.model.salt.assign(torch.tensor([float(numbers[0])]))
            salts.append(float(numbers[0]))
        for _ in range(numbers[0] if kind == "steps" else 1):
            engine.step()
            check_pages(engine)
    engine.run()
    check_pages(engine)
    assert engine._memory.used_pages == 0
    assert len(salts) == engine.stats.weight_version + 1
    for request in requests:
        assert request.done and (request.reason == "aborted" or request.logprobs)
        check_request(trial, bits, request, salts)


def check_request(trial: Any, bits: Any, request: Request, salts: list[float]) -> None:
    out = request.output()
    if not len(out.logprobs):
        return
    if request.sampling is None:
        if request.state == "finished":
            expected = [trial_whole(trial, request.tokens, salt) for salt in salts]
            assert any(torch.equal(out.logprobs, e) for e in expected)
        return
    for version in set(out.versions):
        mine = torch.tensor(out.versions) == version
        expected = trial_whole(trial, request.tokens, salts[version])[request.num_given - 1 :]
        bits(out.logprobs[mine], expected[mine])


def trial_whole(trial: Any, tokens: list[int], salt: float) -> Any:
    trial.model.salt.assign(torch.tensor([salt]))
    return trial.whole(tokens)
