import shutil
import subprocess

import pytest

from cluster.errors import RayLost
from cluster.local_ray import LocalRay
from tests.support.waiting import wait_until


@pytest.fixture
def children(tmp_path):
    """Start what is named like Ray's processes and does nothing: name |-> process."""
    processes = {}
    for name in ("gcs_server", "raylet"):
        (tmp_path / name).symlink_to(shutil.which("sleep"))
        processes[name] = subprocess.Popen([tmp_path / name, "300"])
    yield processes
    for each in processes.values():
        each.kill()
        each.wait()


@pytest.mark.parametrize("is_collected", [False, True], ids=["zombie", "gone"])
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_the_end_of_either_is_told_by_its_name(children, name, is_collected):
    local_ray = LocalRay()
    local_ray.check()

    children[name].kill()
    if is_collected:
        children[name].wait()
    else:
        wait_until(lambda: local_ray.lost)

    assert local_ray.lost == [name]
    with pytest.raises(RayLost, match=f"^Ray's {name} on this host has ended, "):
        local_ray.check()


def test_a_ray_that_ran_before_has_no_process_here():
    LocalRay().check()
