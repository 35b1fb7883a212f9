"""What several tests train."""

import pytest

from papers.tests.experiments.short_runs import vit_study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return vit_study(tmp_path_factory.mktemp("data"))
