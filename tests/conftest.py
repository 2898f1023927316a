"""Order: what needs a browser comes last, and of that the longest files first.

Playwright's synchronous API keeps an event loop running in this thread until the session ends, and tests that call
asyncio.run need one that is not.  It is also the order in which a failure is cheapest.  With two workers each takes the
next file when it is done with its own: a long one at the end would leave the other idle.
"""

import pytest

LONGEST = ("test_oracle", "test_kernels", "test_tuned_browser", "test_attach_ort", "test_harness", "test_architectures")
"""Browser modules that take a minute or nearly."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> tuple[bool, int]:
        name = item.path.stem
        return item.get_closest_marker("browser") is not None, LONGEST.index(name) if name in LONGEST else len(LONGEST)

    items.sort(key=place)
