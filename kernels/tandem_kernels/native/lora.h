// Adds LoRA deltas, (x A^T) B^T, to a product, for the rows of each adapter.
//
// The work is divided into tiles of rows with the same adapter. One thread copies the rows of a
// tile from the product's inputs and computes both multiplications. The bits of a row do not depend
// on the other rows of the tile.

namespace tandem::TANDEM_ISA {

struct LoraItem {
    const LoraRows* adapted;
    int first_row, num_rows;
};

// The tiles of a step's rows that use adapters, and a buffer for each thread. Empty in a step
// without adapters.
struct StepLora {
    std::vector<LoraItem> items;
    std::vector<float*> buffers;
    float* gates = nullptr;  // [rows with adapters, gate and up], initially zeros
    int num_rows = 0;        // rows with adapters
};

// Returns the size of a thread's buffer in floats. The buffer has room for the inputs of a tile,
// for the products of the inputs and A, and for the inputs of one B.
inline size_t lora_floats(const Model& model, const Step& step) {
    int in = std::max(model.hidden, model.inner);
    for (int index = 0; index < model.num_layers; ++index) {
        const Layer& layer = model.layers[index];
        in = std::max(in, layer.attention_out.in);
        if (layer.state != nullptr) in = std::max(in, layer.state->decay_out.in);
        if (layer.latent != nullptr) in = std::max({in, layer.latent->q_out.in, layer.latent->plain});
    }
    return static_cast<size_t>(kTileRows) * (whole_steps(in) + 2 * step.lora_rank);
}

inline StepLora lora_of(const Model& model, const Step& step, Scratch& scratch) {
    StepLora lora;
    for (int i = 0; i < step.num_adapted; ++i) {
        const LoraRows& adapted = step.adapted[i];
        const Tiles tiles{adapted.num_rows};
        for (int tile = 0; tile < tiles.num(); ++tile) {
            const int first = tiles.first_row(tile);
            lora.items.push_back(
                {&adapted, adapted.first_row + first, tiles.first_row(tile + 1) - first});
        }
        lora.num_rows += adapted.num_rows;
    }
    if (lora.items.empty()) return lora;
    for (Buffer& buffer : scratch.lora) lora.buffers.push_back(buffer.of(lora_floats(model, step)));
#ifdef TANDEM_PAIRS  // gate_up may be packed in pairs, and then needs added_gates()
    lora.gates = scratch.gates.of(2 * static_cast<size_t>(lora.num_rows) * model.inner);
#endif
    return lora;
}

// Computes the product of one tile of rows with a matrix of an adapter.
inline void lora_product(const Matrix& matrix, const float* x, int num_rows, const Output& out) {
    const int panels = (matrix.out + kPanel - 1) / kPanel;
    if (matrix.kind == BF16)
        linear_of<Bf16>(matrix, x, num_rows, 0, panels, out);
    else
        linear_of<float>(matrix, x, num_rows, 0, panels, out);
}

inline void add_item(const LoraItem& item, const LoraProduct& product, const Inputs& inputs,
                     const Output& out, float* x) {
    const int num = item.num_rows, rank = product.a.out;
    float* const low = x + static_cast<size_t>(num) * whole_steps(inputs.in);
    float* const part_inputs = low + static_cast<size_t>(num) * rank;
    for (int m = 0; m < num; ++m) inputs.row(item.first_row + m).copy_to(x + m, num);
    lora_product(product.a, x, num, {low, static_cast<size_t>(rank), Into::kSet});
    for (int p = 0; p < product.num_parts; ++p) {
        const LoraPart& part = product.parts[p];
        for (int k = 0; k < part.b.in; ++k)
            for (int m = 0; m < num; ++m)
                part_inputs[k * num + m] = low[m * rank + part.first_rank + k];
        float* const rows = out.rows + item.first_row * out.stride + part.first_output;
        lora_product(part.b, part_inputs, num, {rows, out.stride, Into::kAdd});
    }
}

// Adds the deltas to a product. All threads must call this function, after all of them have
// finished the product.
inline void add_lora(const StepLora& lora, int index, LoraProduct LoraLayer::*product,
                     const Inputs& inputs, const Output& out, const Team& team) {
    if (lora.items.empty()) return;
    team.each_in_turn(lora.items.size(), [&](size_t i) {
        const LoraItem& item = lora.items[i];
        const LoraProduct& added = item.adapted->layers[index].*product;
        if (added.num_parts) add_item(item, added, inputs, out, lora.buffers[team.own_thread]);
    });
}

// Adds the deltas to the product of one head. The thread that computes the head calls this.
inline void add_lora_of_head(const StepLora& lora, int index,
                             const LoraProduct* LoraLayer::*products, int head,
                             const Inputs& inputs, const Output& out, const Team& team) {
    for (const LoraItem& item : lora.items) {
        const LoraProduct* const added = item.adapted->layers[index].*products;
        if (added != nullptr) add_item(item, added[head], inputs, out, lora.buffers[team.own_thread]);
    }
}

// Computes the deltas for gates and ups before the gate_up product, because this product applies
// the activation immediately and never writes gates and ups to memory.
inline AddedGates added_gates(const Model& model, const StepLora& lora, int index,
                              const Inputs& normed, const Team& team) {
    if (lora.items.empty()) return {};
    const size_t width = 2 * static_cast<size_t>(model.inner);
    team.each(lora.num_rows,
              [&](int row) { std::fill_n(lora.gates + row * width, width, 0.0f); });
    add_lora(lora, index, &LoraLayer::gate_up, normed, {lora.gates, width, Into::kAdd}, team);
    return {lora.gates, lora.num_rows, width};
}

}  // namespace tandem::TANDEM_ISA
