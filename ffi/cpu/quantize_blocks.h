// From row operations to kernels: any shape, any tile, several threads. The calling thread has
// cleared flush-to-zero (IeeeSubnormals), as ParallelFor does on others.
#pragma once

#include "common/parallel.h"
#include "common/quantize_desc.h"
#include "cpu/quantize_row_ops.h"

namespace jax_fp8 {

void QuantizeBlocks(const QuantizeRowOps& ops, const QuantizeDesc& desc,
                    const QuantizeBuffers& buffers, const ParallelFor& parallel_for);

void DequantizeBlocks(const QuantizeRowOps& ops, const DequantizeDesc& desc,
                      const DequantizeBuffers& buffers, const ParallelFor& parallel_for);

}  // namespace jax_fp8
