"""What Slurm's words for a job's state and for why it waits mean to us.

Sources: the job state codes and job reason codes of squeue(1), Slurm 22.05 to 25.05.
"""

from enum import Enum


class Phase(Enum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


_WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {
    "CONFIGURING", "COMPLETING", "EXPEDITING", "POWER_UP_NODE", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT",
    "STOPPED", "SUSPENDED", "UPDATE_DB",
}  # fmt: skip
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
}  # fmt: skip

# A job that waits for one of these waits for ever, or for a person.
_HOPELESS = {
    "AccountNotAllowed", "AssocGrpBillingMinutes", "AssocGrpCPUMinutesLimit", "AssocMaxWallDurationPerJobLimit",
    "BadConstraints", "BurstBufferStageInFailed", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS",
    "JobHeldAdmin", "JobHeldUser", "JobHoldMaxRequeue", "NodeDown", "PartitionConfig", "PartitionDown",
    "PartitionInactive", "PartitionNodeLimit", "PartitionTimeLimit", "QOSMaxWallDurationPerJobLimit", "QOSNotAllowed",
    "QOSUsageThreshold", "ReservationDeleted",
}  # fmt: skip


def phase(state: str) -> Phase:
    """Where a job in this state stands; `CANCELLED by 1000` and `NODE_FAIL+` are read by their first word."""
    word = state.partition(" ")[0].rstrip("+")
    for words, found in ((_WAITING, Phase.WAITING), (_RUNNING, Phase.RUNNING), (_ENDED, Phase.ENDED)):
        if word in words:
            return found
    return Phase.UNKNOWN


def hopeless(reason: str) -> bool:
    """Whether a job that waits for this reason waits for ever, or for a person."""
    word = reason.strip().strip("()").split(",")[0]
    return word in _HOPELESS or reason.strip("() ").startswith("ReqNodeNotAvail")
