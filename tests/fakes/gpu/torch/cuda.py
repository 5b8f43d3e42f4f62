"""`torch.cuda` of the stand-in."""

import os
from types import SimpleNamespace

from torch import _faults

nccl = SimpleNamespace(version=lambda: (2, 30, 7))


def device_count():
    return int(os.environ.get("STUB_GPUS", "2"))


def is_available():
    return device_count() > 0


def get_device_capability(index):
    major, _, minor = _faults.told("capability", "12.0").partition(".")
    return int(major), int(minor)


def get_device_name(index):
    return "Stand-in GPU"


def get_arch_list():
    return _faults.told("arch_list", "sm_80 sm_90 sm_120 compute_120").split()


def can_device_access_peer(left, right):
    return False


def set_device(device):
    pass


def synchronize(device=None):
    pass
