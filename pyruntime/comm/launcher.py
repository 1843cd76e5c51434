"""Reads what the launcher of this process has put into its environment."""

from __future__ import annotations

from collections.abc import Mapping

TASKS = {
    "srun": ("SLURM_STEP_NUM_TASKS",),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
}
"""Variables in which launchers say how many tasks they have started."""

GRACE_S = 30.0
"""Seconds that torchrun and Slurm leave between SIGTERM and SIGKILL by default."""


def grace_s(environment: Mapping[str, str]) -> float | None:
    """Returns the seconds that torchrun leaves its ranks between SIGTERM and SIGKILL; None if it has not
    started this process."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    asked = environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
    return float(asked) if asked.isdigit() else GRACE_S


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raises ValueError if a launcher has started several tasks without torchrun's variables, so that each
    would be a job of its own; or if these variables are incomplete or contradict each other."""
    if "RANK" in environment:
        if missing := [
            name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment
        ]:
            raise ValueError(
                f"RANK={environment['RANK']} is set and {', '.join(missing)} is not; start ranks through "
                "torchrun, which sets them all, or unset RANK."
            )
        rank, size = environment["RANK"], environment["WORLD_SIZE"]
        if not (rank.isdigit() and size.isdigit() and int(rank) < int(size)):
            raise ValueError(f"RANK={rank} is none of the ranks of WORLD_SIZE={size}, which begin at 0.")
        return
    for launcher, names in TASKS.items():
        for name in names:
            count = environment.get(name, "")
            if count.isdigit() and int(count) > 1:
                raise ValueError(
                    f"{launcher} has started {count} tasks ({name}={count}) and RANK is not set, so each "
                    "would be a run of its own; let it start one torchrun on each host (torchrun --nnodes "
                    "HOSTS --nproc-per-node RANKS --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29500), or "
                    "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each "
                    "task."
                )
