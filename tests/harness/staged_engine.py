"""An engine process whose tiers copy blocks as on a device, as late as that device may."""

from tandem.engine.tiers import make_tiers
from tandem.engine.tiers.device.staged_blocks import StagedBlocks
from tandem.worker.engine_process import process
from tests.late_device import LateDevice

if __name__ == "__main__":
    make_tiers.device_blocks = lambda rows: StagedBlocks(rows, LateDevice())
    process.main()
