"""All that tokens keep, over pages, and what a bench times, by Triton's interpreter."""

import pytest

from tests.ops.interpreted import interpreted


@pytest.mark.parametrize(
    ("child", "count"),
    [
        pytest.param("paged", 30276, id="paged-B07"),
        pytest.param("pool", 200265, id="pool", marks=pytest.mark.slow(35)),
        pytest.param("bench", 368, id="bench"),
    ],
)
def test_steps_in_pages_have_the_bits_of_a_pack(child: str, count: int) -> None:
    interpreted(f"{child}_child", f"{count} values agree")
