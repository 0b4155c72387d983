import pytest
import torch.distributed as dist


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()
