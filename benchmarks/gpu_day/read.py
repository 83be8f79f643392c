"""Reads of blocks between two processes on one GPU over CUDA IPC, against a copy on the device."""

from __future__ import annotations

from benchmarks.gpu.transfer import Device, measure_reads
from benchmarks.gpu_day.parts import add_row

GOAL = 0.8


def run(*, stand_in: bool) -> None:
    device = Device(stand_in=stand_in)

    def on_row(row: dict[str, float]) -> None:
        add_row(
            f"CUDA IPC, {row['blocks']} blocks, {row['bytes'] / 1e6:,.1f} MB (floor: one copy)",
            ratio=row["copy_s"] / row["ours_s"],
            goal=GOAL if row["blocks"] == device.rows[-1] and not stand_in else None,
            **row,
        )

    measure_reads("cuda_ipc", device, repeats=2 if stand_in else 11, on_row=on_row)
