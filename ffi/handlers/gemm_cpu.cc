// The CPU handler of "jax_fp8.gemm.v1": checks everything that protects memory, turns XLA's buffers
// into one GemmDesc and one GemmBuffers per batch element, and runs the kernel that takes them.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "common/gemm_desc.h"
#include "common/parallel.h"
#include "cpu/emulate.h"
#include "cpu/kernels.h"
#include "handlers/buffers.h"
#include "handlers/gemm_handlers.h"
#include "xla/ffi/api/ffi.h"

namespace jax_fp8 {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("jax_fp8.gemm: " + message);
}

// One operand with its scale and attributes, as XLA passes them.
struct OperandArgs {
  const char* name;     // "lhs", "rhs"
  const char* row_dim;  // "m", "n"
  ffi::AnyBuffer values, scale;
  std::string_view layout;
  ffi::Span<const int64_t> tile;
};

// The dims behind the batch dims of an operand and its scale, told apart by layout.
struct OperandSizes {
  bool k_contiguous, in_panels;
  int64_t rows, k, tile_rows, tile_k, scale_rows, scale_k;
};

bool ParseOutType(ffi::DataType type, OutType* out) {
  if (type == ffi::DataType::F32) return *out = OutType::kF32, true;
  if (type == ffi::DataType::BF16) return *out = OutType::kBF16, true;
  if (type == ffi::DataType::F16) return *out = OutType::kF16, true;
  return false;
}

// Reads and checks one operand against the dims of `out`, of which `rows` is the one it must have.
ffi::Error ReadOperand(const OperandArgs& args, Dims out, int64_t rows, OperandDesc* desc,
                       OperandSizes* sizes) {
  const std::string name = args.name, row_dim = args.row_dim;
  const Dims dims = args.values.dimensions(), scale_dims = args.scale.dimensions();
  if (!ParseFormat(args.values.element_type(), &desc->format)) {
    return Invalid(name + " must be an FP8 array");
  }
  if (args.scale.element_type() != ffi::DataType::F32) {
    return Invalid(name + "_scale must be float32");
  }
  const bool in_panels = args.layout == "panels";
  if (in_panels ? row_dim != "n" : args.layout != row_dim + "k" && args.layout != "k" + row_dim) {
    return Invalid(name + "_layout must be '" + row_dim + "k' or 'k" + row_dim +
                   (row_dim == "n" ? "' or 'panels" : "") + "', is '" + std::string(args.layout) +
                   "'");
  }
  if (dims.size() != out.size() + in_panels || scale_dims.size() != out.size()) {
    return Invalid(name + ToString(dims) + (in_panels ? " in panels, with one dim more, " : ", ") +
                   name + "_scale" + ToString(scale_dims) + " and out" + ToString(out) +
                   " must have the same number of dims");
  }
  if (args.tile.size() != 2 || args.tile[0] < 1 || args.tile[1] < 1) {
    return Invalid(name + "_tile must be two sizes >= 1");
  }
  const size_t batch_rank = out.size() - 2;
  for (size_t i = 0; i < batch_rank; ++i) {
    if ((dims[i] != 1 && dims[i] != out[i]) || (scale_dims[i] != 1 && scale_dims[i] != out[i])) {
      return Invalid("batch dim " + std::to_string(i) + " of " + name + ToString(dims) + " and " +
                     name + "_scale" + ToString(scale_dims) + " must be 1 or that of out" +
                     ToString(out));
    }
  }
  const bool k_contiguous = !in_panels && args.layout[1] == 'k';
  const size_t row_idx = batch_rank + (k_contiguous ? 0 : 1);
  const size_t k_idx = batch_rank + (k_contiguous ? 1 : 0);
  *sizes = {.k_contiguous = k_contiguous,
            .in_panels = in_panels,
            .rows = in_panels ? rows : dims[row_idx],
            .k = dims[in_panels ? batch_rank + 1 : k_idx],
            .tile_rows = args.tile[0],
            .tile_k = args.tile[1],
            .scale_rows = scale_dims[row_idx],
            .scale_k = scale_dims[k_idx]};
  // (panels, k, columns of a panel): only out knows n.
  if (in_panels &&
      (dims[batch_rank] != CeilDiv(rows, kPanelCols) || dims[batch_rank + 2] != kPanelCols)) {
    return Invalid(name + ToString(dims) + " does not have the " +
                   std::to_string(CeilDiv(rows, kPanelCols)) + " panels of " +
                   std::to_string(kPanelCols) + " columns that hold n=" + std::to_string(rows));
  }
  if (sizes->rows != rows) {
    return Invalid(name + ToString(dims) + " has " + row_dim + "=" + std::to_string(sizes->rows) +
                   ", out" + ToString(out) + " has " + row_dim + "=" + std::to_string(rows));
  }
  if (sizes->scale_rows != CeilDiv(sizes->rows, sizes->tile_rows) ||
      sizes->scale_k != CeilDiv(sizes->k, sizes->tile_k)) {
    return Invalid(name + "_scale" + ToString(scale_dims) + " does not have one scale per tile (" +
                   std::to_string(sizes->tile_rows) + ", " + std::to_string(sizes->tile_k) +
                   ") of (" + row_dim + "=" + std::to_string(sizes->rows) +
                   ", k=" + std::to_string(sizes->k) + ")");
  }
  // A tile larger than the operand is the whole operand.
  desc->k_contiguous = k_contiguous;
  desc->in_panels = in_panels;
  desc->tile_rows = std::clamp<int64_t>(sizes->tile_rows, 1, std::max<int64_t>(sizes->rows, 1));
  desc->tile_k = std::clamp<int64_t>(sizes->tile_k, 1, std::max<int64_t>(sizes->k, 1));
  return ffi::Error::Success();
}

// Whether every scale is a value of E8M0: a power of two from 2^-127 to 2^127, or NaN.
// NOTE: decided on bits. XLA's mode would take 2^-127, a subnormal, for zero.
bool HasE8M0Scales(ffi::AnyBuffer scale) {
  const auto* values = static_cast<const float*>(scale.untyped_data());
  return std::all_of(values, values + scale.element_count(), [](float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const bool is_normal_power = bits << 9 == 0 && bits != 0 && bits < 0x7F800000;
    const bool is_smallest = bits == 0x00400000;  // 2^-127
    return is_normal_power || is_smallest || std::isnan(value);
  });
}

// How many of the innermost batch dims fold into m, so that vmap over a few rows each runs as one
// product. Each output still is the same sum of the same terms. Updates desc->m and lhs tile_rows.
size_t FoldBatchIntoM(const OperandArgs& lhs, const OperandArgs& rhs, Dims out, GemmDesc* desc) {
  if (!desc->lhs.k_contiguous) return 0;
  size_t num_folded = 0;
  for (size_t i = out.size() - 2; i-- > 0; ++num_folded) {
    const int64_t size = out[i];
    const bool rhs_is_shared = rhs.values.dimensions()[i] == 1 && rhs.scale.dimensions()[i] == 1;
    if (lhs.values.dimensions()[i] != size || !rhs_is_shared) break;
    // Tiles of the folded m must be the tiles of each m in turn, or one tile over everything.
    if (lhs.scale.dimensions()[i] == size && desc->m % desc->lhs.tile_rows == 0) {
      desc->m *= size;
    } else if (lhs.scale.dimensions()[i] == 1 && desc->lhs.tile_rows == desc->m) {
      desc->m *= size;
      desc->lhs.tile_rows = desc->m;
    } else {
      break;
    }
  }
  return num_folded;
}

int64_t Product(Dims dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= dims[i];
  return product;
}

// Element offset of the matrix that batch element `batch_idx` (row-major over out's first
// `batch_rank` dims) reads from a buffer in which some of these dims are broadcast.
int64_t BatchOffset(Dims dims, Dims out, size_t batch_rank, int64_t batch_idx) {
  int64_t offset = 0, stride = Product(dims, batch_rank, dims.size());
  for (size_t i = batch_rank; i-- > 0;) {
    if (dims[i] != 1) offset += batch_idx % out[i] * stride;
    batch_idx /= out[i];
    stride *= dims[i];
  }
  return offset;
}

OperandBuffer BatchElement(const OperandArgs& args, const OperandSizes& sizes, Dims out,
                           size_t batch_rank, int64_t batch_idx) {
  const auto* values = static_cast<const uint8_t*>(args.values.untyped_data());
  const auto* scale = static_cast<const float*>(args.scale.untyped_data());
  return {.values = values + BatchOffset(args.values.dimensions(), out, batch_rank, batch_idx),
          .leading_stride = sizes.in_panels      ? kPanelCols
                            : sizes.k_contiguous ? sizes.k
                                                 : sizes.rows,
          .panel_stride = sizes.in_panels ? kPanelCols * sizes.k : kPanelCols,
          .scale = scale + BatchOffset(args.scale.dimensions(), out, batch_rank, batch_idx),
          .scale_row_stride = sizes.k_contiguous ? sizes.scale_k : 1,
          .scale_k_stride = sizes.k_contiguous ? 1 : sizes.scale_rows};
}

ffi::Error Gemm(ffi::ThreadPool pool, ffi::AnyBuffer lhs_values, ffi::AnyBuffer rhs_values,
                ffi::AnyBuffer lhs_scale, ffi::AnyBuffer rhs_scale, ffi::Result<ffi::AnyBuffer> out,
                std::string_view lhs_layout, std::string_view rhs_layout,
                ffi::Span<const int64_t> lhs_tile, ffi::Span<const int64_t> rhs_tile,
                std::string_view kernel, bool any_order, std::string_view accumulation,
                int64_t promotion_interval, int64_t split_k) {
  const OperandArgs lhs{"lhs", "m", lhs_values, lhs_scale, lhs_layout, lhs_tile};
  const OperandArgs rhs{"rhs", "n", rhs_values, rhs_scale, rhs_layout, rhs_tile};
  const Dims out_dims = out->dimensions();
  if (out_dims.size() < 2) return Invalid("out" + ToString(out_dims) + " must have dims m and n");

  const size_t rank = out_dims.size();
  GemmDesc desc{.m = out_dims[rank - 2],
                .n = out_dims[rank - 1],
                .k = 0,
                .lhs = {},
                .rhs = {},
                .out = OutType::kF32,
                .machine = FindMachine(accumulation),
                .promotion_interval = promotion_interval,
                .split_k = split_k,
                .any_order = MayReorder(any_order, kernel, out_dims[rank - 2])};
  if (desc.machine == nullptr && accumulation != "native") {
    return Invalid("there is no accumulation model '" + std::string(accumulation) + "'");
  }
  if (promotion_interval < 0 || split_k < 1) {
    return Invalid("promotion_interval must be >= 0 and split_k >= 1");
  }
  OperandSizes lhs_sizes, rhs_sizes;
  if (auto error = ReadOperand(lhs, out_dims, desc.m, &desc.lhs, &lhs_sizes); error.failure()) {
    return error;
  }
  if (auto error = ReadOperand(rhs, out_dims, desc.n, &desc.rhs, &rhs_sizes); error.failure()) {
    return error;
  }
  if (lhs_sizes.k != rhs_sizes.k) {
    return Invalid("lhs" + ToString(lhs.values.dimensions()) +
                   " has k=" + std::to_string(lhs_sizes.k) + ", rhs" +
                   ToString(rhs.values.dimensions()) + " has k=" + std::to_string(rhs_sizes.k));
  }
  desc.k = lhs_sizes.k;
  if (!ParseOutType(out->element_type(), &desc.out)) {
    return Invalid("out must be float32, bfloat16 or float16");
  }

  std::string reasons;
  const auto rows = desc.is_emulated() ? EmulateKernels() : GemmKernels(desc.any_order);
  const GemmKernel* row = Pick(rows, desc, kernel, &reasons);
  if (row == nullptr) return Invalid(reasons);
  if (desc.machine != nullptr && desc.machine->scales_inside) {
    for (const OperandArgs& args : {lhs, rhs}) {
      if (!HasE8M0Scales(args.scale)) {
        return Invalid(std::string(args.name) + "_scale must hold powers of two, or NaN, for " +
                       desc.machine->name);
      }
    }
  }
  if (out->element_count() == 0) return ffi::Error::Success();
  if (desc.k == 0) {
    std::memset(out->untyped_data(), 0, out->size_bytes());
    return ffi::Error::Success();
  }

  try {
    const size_t batch_rank = rank - 2 - FoldBatchIntoM(lhs, rhs, out_dims, &desc);
    const int64_t out_bytes = desc.m * desc.n * (desc.out == OutType::kF32 ? 4 : 2);
    thread_local std::vector<GemmBuffers> batch;  // so that calls allocate nothing once warm
    batch.resize(Product(out_dims, 0, batch_rank));
    for (size_t i = 0; i < batch.size(); ++i) {
      batch[i] = {.lhs = BatchElement(lhs, lhs_sizes, out_dims, batch_rank, i),
                  .rhs = BatchElement(rhs, rhs_sizes, out_dims, batch_rank, i),
                  .out = static_cast<char*>(out->untyped_data()) + i * out_bytes};
    }
    const ParallelFor parallel_for = OnPool(pool);
    const bool done = desc.is_emulated() ? RunEmulate(*row, desc, batch, parallel_for)
                                         : row->run(desc, batch, parallel_for);
    if (done) return ffi::Error::Success();
  } catch (const std::bad_alloc&) {  // no exception may reach XLA
  }
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "jax_fp8.gemm: no memory for the scratch of kernel " + std::string(row->name));
}

XLA_FFI_DEFINE_HANDLER(GemmHandler, Gemm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()  // lhs
                           .Arg<ffi::AnyBuffer>()  // rhs
                           .Arg<ffi::AnyBuffer>()  // lhs_scale
                           .Arg<ffi::AnyBuffer>()  // rhs_scale
                           .Ret<ffi::AnyBuffer>()  // out
                           .Attr<std::string_view>("lhs_layout")
                           .Attr<std::string_view>("rhs_layout")
                           .Attr<ffi::Span<const int64_t>>("lhs_tile")
                           .Attr<ffi::Span<const int64_t>>("rhs_tile")
                           .Attr<std::string_view>("kernel")
                           .Attr<bool>("any_order")
                           .Attr<std::string_view>("accumulation")
                           .Attr<int64_t>("promotion_interval")
                           .Attr<int64_t>("split_k"));

}  // namespace

std::vector<Registration> GemmRegistrations() {
  return {{"jax_fp8.gemm.v1", "cpu", reinterpret_cast<void*>(GemmHandler)}};
}

}  // namespace jax_fp8
