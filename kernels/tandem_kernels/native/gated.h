// Computes activation(gate) * up. All activations have the form x / (1 + exp(-f(x))):
//
//     silu         f(x) = alpha x, and the result is multiplied by alpha * limit
//     gelu_tanh    f(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//     clamped      f(x) = alpha x
//
// With `clamped`, `gate` is first clamped to at most `limit`, and `up` is clamped to the range
// -limit to limit. Then `offset` is added to `up`.

namespace tandem::TANDEM_ISA {

inline Floats gate_power(Floats gate, const Gating& gating) {
    if (gating.activation != GELU_TANH_GATE) return gate * gating.alpha;
    return gate * fused(gate * gate, 0.0713548162726f, 1.5957691216057308f);
}

inline void clamp_gate(Floats& gate, Floats& up, const Gating& gating) {
    if (gating.activation == SILU_GATE) up *= gating.alpha * gating.limit;
    if (gating.activation != CLAMPED_GATE) return;
    const Floats most = all(gating.limit);
    gate = gate < most ? gate : most;
    up = max(up < most ? up : most, -most) + gating.offset;
}

inline Floats gated(Floats gate, Floats up, const Gating& gating) {
    clamp_gate(gate, up, gating);
    return gate / (exp(-gate_power(gate, gating)) + 1.0f) * up;
}

#ifdef TANDEM_PAIRS
// Computes activation(gate) * up with 14 bits of precision, which is enough if the result is
// rounded to bf16. This is faster, because exp has fewer terms and there is no division.
inline Floats gated_for_bf16(Floats gate, Floats up, const Gating& gating) {
    clamp_gate(gate, up, gating);
    const __m512 power = (__m512)(gate_power(gate, gating) * -1.44269504088896341f);
    const __m512 whole = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT);
    const Floats part = (Floats)power - (Floats)whole;  // in [-1/2, 1/2]
    Floats p = fused(part, 9.6181291e-3f, 5.5504109e-2f);  // Taylor series of 2^part
    p = fused(p, part, 2.4022651e-1f);
    p = fused(p, part, 6.9314718e-1f);
    p = fused(p, part, 1.0f);
    const Floats below = (Floats)_mm512_scalef_ps((__m512)p, whole) + 1.0f;
    return gate * (Floats)_mm512_rcp14_ps((__m512)below) * up;
}
#endif

}  // namespace tandem::TANDEM_ISA
