//! The functions of the operations, by the file of each family: those of `cpu/` and of `cuda/` have the same names.

/// Calls a macro with what is given, and with all operations and their functions. The last are products, which pack operands on the CPU.
macro_rules! families {
    ($call:ident! $($given:tt)*) => {
        $call! {
            [$($given)*]
            [
                elementwise: Fill fill, Copy copy, AddBias add_bias, BiasBackward bias_backward;
                dequantise: DequantiseBytes dequantise_bytes, DequantiseNf4 dequantise_nf4, DequantiseMxfp4 dequantise_mxfp4;
                fp8: AbsMax abs_max, Quantise quantise, QuantiseTransposed quantise_transposed,
                    TransposeCodes transpose_codes;
                dropout: BiasDropoutAdd bias_dropout_add, DropoutScale dropout_scale;
                embedding: Embedding embedding, EmbeddingBackward embedding_backward;
                positions: AddPositions add_positions, AddPositionsBackward add_positions_backward;
                rms_norm: RmsNorm rms_norm, RmsNormBackward rms_norm_backward;
                layer_norm: LayerNorm layer_norm, LayerNormBackward layer_norm_backward;
                rotary: Rotary rotary;
                qkv: SplitQkv split_qkv, JoinQkv join_qkv;
                attention: Attention attention, AttentionBackward attention_backward;
                flash: FlashAttention flash_attention, FlashAttentionBackward flash_attention_backward;
                cache: StoreInCache store_in_cache, CachedAttention cached_attention;
                swiglu: GatedActivation gated_activation,
                    GatedActivationBackward gated_activation_backward;
                router: Route route, RouteBackward route_backward, RouterZLoss router_z_loss,
                    GroupByExpert group_by_expert, CountChoices count_choices, BalanceLoss balance_loss,
                    StepRouterBias step_router_bias;
                experts: SumRows sum_rows, WeighedGatedActivation weighed_gated_activation,
                    WeighedGatedActivationBackward weighed_gated_activation_backward,
                    ExpertBiasGradient expert_bias_gradient,
                    ExpertBiasDweights expert_bias_dweights;
                latent: RotaryTail rotary_tail, ExpandKeys expand_keys,
                    ExpandKeysBackward expand_keys_backward;
                short_convolution: ShortConvolution short_convolution, ShortConvolutionBackward short_convolution_backward;
                gated_delta: GatedDelta gated_delta, GatedDeltaBackward gated_delta_backward;
                gated_norm: GatedNorm gated_norm, GatedNormBackward gated_norm_backward;
                delta_cache: CachedConvolution cached_convolution, CachedDelta cached_delta;
                gelu: Gelu gelu, GeluBackward gelu_backward;
                sigmoid_gate: SigmoidGate sigmoid_gate, SigmoidGateBackward sigmoid_gate_backward;
                cross_entropy: CrossEntropy cross_entropy, SoftCap soft_cap;
                preference: PreferenceLoss preference_loss;
                policy: PolicyGradientLoss policy_loss;
                norm: Sum sum, NormGrains norm_grains, NormAndClip norm_and_clip;
                sum_in_order: SumInOrder sum_in_order;
                adamw: AdamW adamw;
                muon: Momentum momentum, DivideByNorm divide_by_norm, Combine combine, StepAlong step_along;
                adafactor: VarianceScale variance_scale, VarianceSums variance_sums,
                    FactorVariance factor_variance, UpdateSquares update_squares,
                    WeightSquares weight_squares, AdafactorRate adafactor_rate, AdafactorStep adafactor_step;
            ]
            [
                matmul: Matmul matmul, Gram gram;
                fp8: ScaledMatmul scaled_matmul;
                experts: GroupedMatmul grouped_matmul, GroupedGradient grouped_gradient;
            ]
        }
    };
}
pub(crate) use families;
