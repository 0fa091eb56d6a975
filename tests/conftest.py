import os

import pytest
import torch

# Lightning 2.6's CLI calls what jsonargparse deprecates.
os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Every test starts from the same random numbers, on one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(params=["unit", "parameter"])
def granularity(request: pytest.FixtureRequest) -> str:
    return request.param
