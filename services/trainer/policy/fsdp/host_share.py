"""A rank's share of its host: cores beside its GPU, and as many threads as leave the other ranks theirs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PCI_DEVICES = Path("/sys/bus/pci/devices")


def take_share(device: torch.device, num_ranks: int, environment: Mapping[str, str] = os.environ) -> None:
    """Bind this thread, and those that it starts, to the cores beside the GPU, so that page-locked memory is
    there too; and set torch's number of threads, unless OMP_NUM_THREADS has."""
    # Before it is narrowed below: a rank's share is one of the host, not of a NUMA node.
    cores = os.sched_getaffinity(0)
    if "OMP_NUM_THREADS" not in environment:
        local = int(environment.get("LOCAL_WORLD_SIZE", num_ranks))
        torch.set_num_threads(max(1, len(cores) // local))
    if device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        # Of a container's cores, none may be beside the GPU: nothing is bound then.
        if beside := cores_beside(address) & cores:
            os.sched_setaffinity(0, beside)


def cores_beside(address: str, devices: Path = PCI_DEVICES) -> set[int]:
    """Those of the GPU's NUMA node; none where the system does not tell."""
    try:
        listed = (devices / address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return set()
    spans = [span.partition("-") for span in listed.split(",") if span]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
