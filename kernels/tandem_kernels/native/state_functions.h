// The kernels of layers with a state. They are compiled apart from the rest of an instruction set, so
// that the compiler can use another core.

namespace tandem::TANDEM_ISA {

void convolve(const Convolution& convolution, const Team& team);
void scan_states(const StateScan& scan, const Team& team);

}  // namespace tandem::TANDEM_ISA
