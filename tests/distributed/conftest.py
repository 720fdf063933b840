"""One pool of ranks for all distributed tests."""

from collections.abc import Iterator

import pytest

from tests.support.pool import Pool


@pytest.fixture(scope="package")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()
