"""An engine process whose tiers copy blocks like on a device, with the latest completion that a
device allows."""

from tandem.engine.tiers import make_tiers
from tandem.engine.tiers.device.staged_blocks import StagedBlocks
from tandem.worker.engine_process import process
from tests.late_device import LateDevice

if __name__ == "__main__":
    make_tiers.device_blocks = lambda rows: StagedBlocks(rows, LateDevice())
    process.main()
