"""Every report of FP8 users that this package answers so far, as a test in one table.

An id stands for a row of the project's list of user reports (E1 to E55 concern JAX, its libraries
and FP8 in training); `pytest -k E13` runs that report.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from user_reports import amax, compiling, layouts, rounding, shapes, transforming


class Report(NamedTuple):
    """Where it was reported, what holds here instead, and the test of that claim."""

    reference: str
    claim: str
    test: Callable[[], None]


REPORTS = {
    # Saturation, NaN, infinity, rounding.
    "E1": Report(
        "jax-ml/ml_dtypes#400",
        "quantize saturates at 448 where a raw cast gives NaN, in float32 and bfloat16",
        rounding.quantize_saturates_where_a_cast_gives_nan,
    ),
    "E2": Report(
        "jax-ml/ml_dtypes#260",
        "saturate=False gives NaN or infinity beyond the largest value, True the largest value",
        rounding.saturation_is_an_option,
    ),
    "E3": Report(
        "jax-ml/ml_dtypes#147",
        "449 rounds down to 448 by itself, 480 only when saturating; the docstring says so",
        rounding.rounding_down_to_the_largest_value_is_not_saturation,
    ),
    "E4": Report(
        "huggingface/transformers PR 42775",
        "twice the calibrated largest value saturates under a static scale; NaN is not hidden",
        rounding.static_scale_saturates_and_keeps_nan,
    ),
    "E5": Report(
        "AI-Hypercomputer/maxtext PR 3721",
        "NaN reaches loss and gradients, and only the entries that depend on it",
        rounding.nan_reaches_loss_and_gradients,
    ),
    "E6": Report(
        "pytorch/ao PR 4725",
        "NaN and infinity leave a tile's scale alone; power-of-two and E8M0 scales are exact",
        rounding.mx_rules_of_one_tile,
    ),
    "E7": Report(
        "onnx/onnx#6220",
        "FNUZ formats are refused by name wherever a format or an FP8 array can be given",
        rounding.fnuz_is_refused_by_name,
    ),
    "E8": Report(
        "llvm/torch-mlir PR 4616, google/flax",
        "float16 results are rounded once from FP32, behind the scale: no overflow before it",
        rounding.float16_results_do_not_overflow_before_the_scale,
    ),
    "E9": Report(
        "openxla/xla#41605",
        "the compiler does not drop quantisation under jit",
        rounding.quantisation_survives_the_compiler,
    ),
    "E10": Report(
        "deepseek-ai/DeepGEMM#37, #50; NVIDIA/cutlass#1329",
        "small products are not lost beside a large one: sums are FP32 and within its bound",
        rounding.small_products_are_not_lost_beside_a_large_one,
    ),
    "E11": Report(
        "r-xla/anvl#540",
        "subnormals of both formats and of FP32 scale products are kept by every kernel",
        rounding.subnormals_are_kept,
    ),
    "E12": Report(
        "vllm-project/vllm PR 49410",
        "every code decodes exactly under jit, also to an FP32 subnormal",
        rounding.every_code_decodes_exactly_under_jit,
    ),
    # Zero, tiny and huge amax.
    "E13": Report(
        "pytorch/ao#4713",
        "an all-zero tensor or row has scale 1 and gives zeros, never NaN",
        amax.zeros_have_scale_one,
    ),
    "E14": Report(
        "huggingface/kernels-community PR 680",
        "an all-zero block has scale 1 and gives zeros, never NaN",
        amax.a_zero_block_stays_zero,
    ),
    "E15": Report(
        "NVIDIA/TransformerEngine PR 786, google/flax",
        "scales of amax 1e-45 to 3e38 are normal and finite, and results are right",
        amax.scales_stay_normal_and_finite,
    ),
    "E16": Report(
        "pytorch/ao PR 3171",
        "row-wise bfloat16 gradients with power-of-two scales are finite and right",
        amax.rowwise_bfloat16_gradients_stay_finite,
    ),
    "E17": Report(
        "pytorch/torchtitan#764, google/flax, google/qwix",
        "the amax of nothing is 0: empty operands have scale 1",
        amax.amax_of_nothing_is_zero,
    ),
    "E18": Report(
        "pytorch/torchtitan#865",
        "row-wise training stays finite and unsaturated while weights grow by 10^20",
        amax.rowwise_training_survives_growing_weights,
    ),
    "E19": Report(
        "NVIDIA/Model-Optimizer PR 381",
        "an all-zero channel has scale 1 and leaves the others alone",
        amax.a_zero_channel_leaves_the_others_alone,
    ),
    # Shapes and sizes.
    "E20": Report(
        "NVIDIA/TransformerEngine#1422",
        "a weight of 896 by 712 works, forward and backward",
        shapes.odd_weight_of_896_by_712,
    ),
    "E21": Report(
        "NVIDIA/TransformerEngine#232",
        "an input of 50 by 4096 works, forward and backward",
        shapes.odd_input_of_50_by_4096,
    ),
    "E22": Report(
        "NVIDIA/TransformerEngine#1571",
        "one row, and a vector, work",
        shapes.one_row,
    ),
    "E23": Report(
        "NVIDIA/TransformerEngine#688",
        "2048 by 767 works; a message names the dim that does not fit and no other",
        shapes.messages_name_the_dim_that_does_not_fit,
    ),
    "E24": Report(
        "NVIDIA/TransformerEngine PR 2261",
        "a Dense of 10 outputs works; wrong shapes raise while tracing",
        shapes.ten_outputs,
    ),
    "E25": Report("pytorch/ao#1268", "15 output features work", shapes.fifteen_outputs),
    "E26": Report(
        "pytorch/pytorch PR 140967",
        "sizes of 0 give zeros or an empty result, under jit, vmap and grad too",
        shapes.size_zero_in_every_dim,
    ),
    "E27": Report(
        "NVIDIA/TransformerEngine#2966",
        "a last dim of 96 works with tiles that do not divide it",
        shapes.last_dim_of_96,
    ),
    "E28": Report(
        "gradium-ai/xn PR 55",
        "20001 rows and 4 rows work on every kernel",
        shapes.twenty_thousand_rows_and_four,
    ),
    # Layout and scale semantics.
    "E29": Report(
        "pytorch/pytorch#191138",
        "a row-major rhs is accepted eagerly and compiled, with the same bits",
        layouts.row_major_rhs_gives_the_same_bits_everywhere,
    ),
    "E30": Report(
        "torch-spyre/torch-spyre#4311",
        "transposed operands give the same bits",
        layouts.transposed_operands_give_the_same_bits,
    ),
    "E31": Report(
        "pytorch/pytorch#198126",
        "NN, NT, TN and TT have gradients with the same bits",
        layouts.gradients_of_every_layout_give_the_same_bits,
    ),
    "E32": Report(
        "pytorch/pytorch#190449",
        "an output scale is refused",
        layouts.an_output_scale_is_refused,
    ),
    "E33": Report(
        "pytorch/pytorch#154807",
        "every argument has an effect or raises",
        layouts.no_argument_is_silently_unused,
    ),
    "E34": Report(
        "pytorch/pytorch#161127",
        "tracing and running accept the same scales and refuse others with the same message",
        layouts.one_validator_serves_tracing_and_running,
    ),
    "E35": Report(
        "pytorch/pytorch PR 182909",
        "valid pairs of scale kinds are a table; each is computed right, others raise",
        layouts.pairs_of_scale_kinds_are_a_table,
    ),
    "E36": Report(
        "pytorch/pytorch PR 164844",
        "without a result dtype, scaled calls give float32",
        layouts.default_result_is_float32,
    ),
    "E37": Report(
        "paiml/aprender#2810",
        "per-channel scales save small output channels, and the recipe's docstring says so",
        layouts.per_channel_scales_save_small_channels,
    ),
    # Compiler pattern matching.
    "E38": Report(
        "jax-ml/jax#22313",
        "a scaled product is our kernel in the compiled program",
        compiling.scaled_calls_are_our_kernel,
    ),
    "E39": Report(
        "openxla/xla#17887",
        "forward and both gradients are our kernel, for every recipe and dtype",
        compiling.forward_and_both_gradients_are_our_kernel,
    ),
    "E40": Report(
        "jax-ml/jax#17176",
        "a Flax Dense and both its gradients are our kernel",
        compiling.flax_dense_is_our_kernel,
    ),
    "E41": Report(
        "google/flax PR 4686, AI-Hypercomputer/maxtext PR 1541",
        "where a kernel is required, its absence is an error and no fallback",
        compiling.a_missing_kernel_is_an_error_and_not_a_fallback,
    ),
    "E42": Report(
        "jax-ml/jax#19033",
        "both formats and all dtypes go through every public call; others are refused",
        compiling.what_works_is_a_list,
    ),
    # Autodiff.
    "E43": Report(
        "jax-ml/jax#27144",
        "cotangents have their primal's dtype: in scan and remat, used twice, multiplied",
        transforming.cotangents_have_the_dtype_of_their_primal,
    ),
    "E44": Report(
        "jax-ml/jax#18931",
        "integer operands are refused by name; behind a cast they have no gradient",
        transforming.integer_operands_are_refused_or_have_no_gradient,
    ),
    "E45": Report(
        "jax-ml/jax PR 7651, 7652",
        "a gradient asked of raw FP8 values or scales is an error that names the operand",
        transforming.raw_fp8_operands_have_no_gradient,
    ),
    "E46": Report(
        "jax-ml/jax#16049, google-research/t5x#351",
        "jvp and Hessians in all four orders of modes are right",
        transforming.forward_mode_and_second_derivatives_work,
    ),
    "E47": Report(
        "jax-ml/jax PR 28757",
        "gradients have their primal's shape, broadcast batch dims included",
        transforming.gradients_have_the_shape_of_their_primal,
    ),
    "E48": Report(
        "pytorch/ao#3111",
        "a model of swapped layers has the gradients of the plain one, up to FP8's error",
        transforming.a_swapped_layer_differentiates,
    ),
    # vmap, and one device per example.
    "E49": Report(
        "jax-ml/jax#38495",
        "vmap over every subset of operands, nested, and with grad, is a loop bit for bit",
        transforming.mapping_with_unmapped_operands_works,
    ),
    "E50": Report(
        "jax-ml/jax#38813",
        "where there is no kernel the error lists the platforms that have one",
        transforming.the_error_for_a_missing_platform_lists_platforms,
    ),
    "E51": Report(
        "jax-ml/jax#11948",
        "vmap inside shard_map is the same as outside",
        transforming.vmap_works_inside_shard_map,
    ),
    "E54": Report(
        "NVIDIA/warp#1851",
        "results vary over their operands' mesh axes: a scan in shard_map type-checks",
        transforming.results_vary_over_the_axes_of_their_operands,
    ),
    "E55": Report(
        "google-deepmind/mujoco#3426",
        "a scan in shard_map has right gradients, taken inside and outside",
        transforming.scans_over_shards_can_be_differentiated,
    ),
}

#: Reports that are not answered yet, and why.
LEFT_OUT = {
    "E52": "partitioning over Auto mesh axes without gathering: partition rules do not exist yet",
    "E53": "the same over Explicit axes: such an operand is refused, see test_bad_input.py",
}


@pytest.mark.parametrize("name", REPORTS)
def test_report(name):
    REPORTS[name].test()


def test_every_report_is_tested_or_left_out_with_a_reason():
    assert sorted([*REPORTS, *LEFT_OUT]) == sorted(f"E{i}" for i in range(1, 56))
    assert not set(REPORTS) & set(LEFT_OUT)
    assert all(LEFT_OUT.values())
    tests = [report.test for report in REPORTS.values()]
    assert len(set(tests)) == len(tests)
