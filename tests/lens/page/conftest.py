"""One browser for all tests of the page: it takes a second to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lens.page.browser import Browser


@pytest.fixture(scope="package")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()
