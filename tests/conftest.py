"""Order: what needs a browser comes last.

Playwright's synchronous API keeps an event loop running in this thread until the session ends, and tests that call
asyncio.run need one that is not.  It is also the order in which a failure is cheapest.
"""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)
