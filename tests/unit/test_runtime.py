"""The process as the bits need it, and ranks that share a machine."""

from __future__ import annotations

from lockstep.runtime import shared_devices, with_cpu


def test_memory_of_a_device_is_not_taken_all_at_once() -> None:
    assert shared_devices({}, 0) == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_every_local_rank_has_a_device_of_its_own() -> None:
    for launcher in ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        chosen = [shared_devices({launcher: str(rank)}, 2)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
        assert chosen == ["0", "1", "0", "1"]


def test_one_process_or_one_device_needs_no_choice() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in shared_devices({}, 4)
    assert "CUDA_VISIBLE_DEVICES" not in shared_devices({"MPI_LOCALRANKID": "1"}, 1)


def test_what_the_user_chose_is_left_alone() -> None:
    own = {"CUDA_VISIBLE_DEVICES": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "true", "MPI_LOCALRANKID": "1"}
    assert shared_devices(own, 4) == {}


def test_the_cpu_is_there_beside_what_the_user_chose() -> None:
    assert [with_cpu(named) for named in ("cuda", "cpu", "cuda,cpu", "")] == ["cuda,cpu", "cpu", "cuda,cpu", ""]
