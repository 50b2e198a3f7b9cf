"""Settings that make a model type's config small, and what differs from type to type.

A field whose name says what it is (`hidden_size`, `encoder_layers`, `image_token_id`) gets a small value.
"""

from __future__ import annotations

from typing import Any

WIDTH, HEADS, LAYERS, WORDS = 32, 4, 2, 99
PAD, BOS, EOS = 0, 1, 2
FIRST_WORD, LAST_WORD = 5, 70  # what random text is drawn from; ids of images and the like are above
BATCH, LENGTH, SHORT = 2, 9, 5
TARGET, SHORT_TARGET = 6, 4
SIDE, PATCH = 16, 4
SPREAD = 0.15  # of weights: wide enough for maps that are far from uniform
LARGEST = 60_000_000  # parameters

# Heads to try, in order: what says most of a type comes first.
HEADS_IN_ORDER = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MULTIMODAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "CTC",
    "MASKED_LM",
    "CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "SEMANTIC_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "VISUAL_QUESTION_ANSWERING",
    "TIME_SERIES_PREDICTION",
    "MASK_GENERATION",
    "",
    "BACKBONE",
)

TOKENS = {
    "image_token_id": 98,
    "image_token_index": 98,
    "video_token_id": 97,
    "video_token_index": 97,
    "audio_token_id": 96,
    "audio_token_index": 96,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "decoder_start_token_id": BOS,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}

_WIDTHS = """
    hidden_size d_model n_embd embed_dim dim hidden_dim embedding_size embedding_dim emb_dim
    out_hidden_size encoder_hidden_size decoder_hidden_size text_hidden_size projection_dim
    cross_hidden_size project_dim word_embed_proj_dim text_embed_dim encoder_hidden_dim
    backbone_hidden_size output_dim audio_embed_dim mm_embed_dim output_proj_dims
    qformer_hidden_size vision_hidden_size input_hidden_size text_model_hidden_size
    projector_hidden_size image_text_hidden_size input_embedding_size output_embedding_size
    attention_size pronunciation_embed_dim shape_embed_dim pred_hidden_size patch_embed_hidden_size
    visual_embedding_dim hidden_size_global vision_output_dim lru_width fusion_hidden_size
    mit_hidden_size model_dim flow_size head_hidden_size vit_dim aux_embed_dim encoder_embed_dim
    decoder_embed_dim reassemble_hidden_size llm_hidden_size vision_dim hidden_size_per_layer_input
    n_embed patch_embeds_hidden_size fpn_hidden_size adapter_hidden_size mask_feature_size
    feature_size adaptor_hidden_size codevector_dim proj_codevector_dim classifier_proj_size
    xvector_output_dim conv_channels auxiliary_channels visual_feat_dim audio_hidden_size
    condition_dim entity_emb_size image_token_embed_dim output_channels neck_out_channels
"""
_FEED_FORWARD = """
    intermediate_size ffn_dim d_ff d_inner dff dim_ff n_inner encoder_ffn_dim decoder_ffn_dim
    mlp_dim feed_forward_size encoder_intermediate_size decoder_intermediate_size
    shared_expert_intermediate_size shared_intermediate_size ffn_hidden_size encoder_linear_units
    decoder_linear_units dim_feedforward encoder_feedforward_dim speech_encoder_intermediate_size
    t2u_encoder_ffn_dim t2u_decoder_ffn_dim projection_intermediate_size alignment_intermediate_size
    intermediate_size_mlp dense_intermediate_size mit_intermediate_size audio_intermediate_size
    mlp_hidden_size pair_transition_intermediate_size channels_mlp_dim tokens_mlp_dim inner_dim
    share_expert_dim moe_shared_expert_intermediate_size expert_intermediate_size
    prediction_head_size
"""
_LAYERS = """
    num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers depth
    num_decoder_layers num_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers layers
    speech_encoder_layers t2u_encoder_layers t2u_decoder_layers resampler_depth num_block
    conf_num_hidden_layers mit_num_hidden_layers pred_num_hidden_layers l_layers x_layers r_layers
    text_layers vision_layers num_self_attends_per_block num_temporal_layers num_spatial_layers
    num_auxiliary_layers max_window_layers num_pooler_layers text_encoder_layers
    num_attention_layers num_fusion_layers aligner_num_add_layers folding_trunk_num_hidden_layers
    parcae_num_coda_layers num_nextn_predict_layers memory_attention_num_layers prompt_layers
    num_timestamp_prediction_layers conformer_layers
"""
_ATTENTION_HEADS = """
    num_attention_heads num_heads n_head n_heads attention_heads encoder_attention_heads
    decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads
    speech_encoder_attention_heads t2u_encoder_attention_heads t2u_decoder_attention_heads
    resampler_n_heads resampler_heads resampler_num_heads conf_num_attention_heads
    mit_num_attention_heads pred_num_attention_heads cross_num_attention_heads
    cross_num_key_value_heads num_self_attention_heads num_cross_attention_heads
    prompt_num_attention_heads decoder_self_attention_heads decoder_cross_attention_heads
    num_attn_heads num_key_value_attention_heads num_conv_pos_embedding_groups
    perceiver_resampler_num_attention_heads num_ngram_heads num_encoder_attention_heads
    num_decoder_attention_heads
"""
_HEAD_WIDTHS = """
    head_dim d_kv d_head dim_head attention_head_size cross_head_dim resampler_head_dim
    resampler_dim_head v_head_dim qk_nope_head_dim qk_rope_head_dim index_head_dim
    linear_key_head_dim linear_value_head_dim linear_head_dim rotary_dim global_head_dim
    attention_head_dim mamba_headdim mamba_d_head mamba_head_dim swa_head_dim kv_channels
    perceiver_resampler_attention_head_dim
"""
_EXPERTS = """
    num_experts n_routed_experts num_local_experts moe_num_experts moe_num_primary_experts
    num_expert
"""
_EXPERTS_USED = """
    num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts moe_top_k
    num_selected_experts
"""
_CLASSES = """
    vocab_size text_vocab_size src_vocab_size tgt_vocab_size t2u_vocab_size char_vocab_size
    unit_hifi_gan_vocab_size vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size
    audio_vocab_size vision_vocab_size decoder_vocab_size encoder_vocab_size head_out_channels
"""


def _each(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


SMALL: dict[str, Any] = {
    **TOKENS,
    **_each(_WIDTHS, WIDTH),
    **_each(_FEED_FORWARD, 48),
    **_each(_LAYERS, LAYERS),
    **_each(_ATTENTION_HEADS, HEADS),
    **_each(_HEAD_WIDTHS, 8),
    **_each(_EXPERTS, 4),
    **_each(_EXPERTS_USED, 2),
    **_each(_CLASSES, WORDS),
    "num_key_value_heads": 2,
    "multi_query_group_num": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_groups": 1,
    "n_groups": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 4,
    "index_topk": 4,
    "linear_num_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_d_state": 8,
    "mamba_d_ssm": 64,
    "mamba_chunk_size": 4,
    "n_mamba_heads": 2,
    "state_size": 8,
    "ssm_state_size": 8,
    "time_step_rank": 4,
    "chunk_size": 4,
    "sliding_window": 5,
    "local_attention": 6,
    "attention_window_size": 5,
    "window_size": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "max_target_positions": 64,
    "max_source_positions": 20,
    "max_text_positions": 64,
    "max_speech_positions": 64,
    "original_max_position_embeddings": 64,
    "left_max_position_embeddings": 8,
    "right_max_position_embeddings": 8,
    "t2u_max_position_embeddings": 64,
    "num_position_embeddings": 16,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "num_mel_bins": 8,
    "input_feat_per_channel": 8,
    "num_channels": 3,
    "image_size": SIDE,
    "img_size": SIDE,
    "pretrain_image_size": SIDE,
    "crop_size": SIDE,
    "patch_size": PATCH,
    "encoder_stride": PATCH,
    "num_frames": 2,
    "frames_per_clip": 2,
    "tubelet_size": 1,
    "temporal_patch_size": 1,
    "spatial_merge_size": 2,
    "image_seq_length": 16,
    "mm_tokens_per_image": 4,
    "num_queries": 6,
    "num_query_tokens": 4,
    "num_denoising": 0,
    "decoder_in_channels": (WIDTH, WIDTH, WIDTH),
    "num_feature_levels": 3,
    "num_latents": 4,
    "resampler_n_latents": 4,
    "resampler_num_latents": 4,
    "latent_query_num": 4,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "conv_depthwise_kernel_size": 3,
    "conv_kernel_size": 3,
    "conv_pos_kernel_size": 3,
    "tdnn_dim": (16, 16, 32),
    "tdnn_kernel": (3, 3, 1),
    "tdnn_dilation": (1, 1, 1),
    "num_codevectors_per_group": 8,
    "feature_projection_input_dim": 8,
    "mask_time_length": 2,
    "mask_time_min_masks": 0,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "global_attn_indexes": (1,),
    "fullatt_block_indexes": (1,),
    "deepstack_visual_indexes": (0,),
    "codebook_size": 32,
    "num_embeddings": 32,
    "laurel_rank": 8,
    "query_pre_attn_scalar": 8,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "mm_posemb_size": 32,
    "position_embedding_size": 32,
    "num_kv_shared_layers": 0,
    "coordinate_size": 6,
    "shape_size": 4,
    "max_2d_position_embeddings": 1024,
    "attention_window": 4,
    "encoder_attention_window": 4,
    "initializer_range": SPREAD,
    "init_std": SPREAD,
    "layerscale_value": 0.5,
    "layer_scale_init_value": 0.5,
    "vision_feature_layer": -1,
    "n_window": 4,
    "n_window_infer": 8,
    "downsample_hidden_size": 16,
    "conv_chunksize": 500,
    "projector_hidden_act": "gelu",
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "num_local_blocks": 1,
    "context_length": 16,
    "prediction_length": 4,
    "patch_length": 4,
    "num_experts_per_layer": 2,
    "router_hidden_size": 16,
    "num_hash_buckets": 64,
    "codebook_dim": 16,
    "t2u_variance_predictor_embed_dim": 32,
    "t2u_variance_predictor_hidden_dim": 16,
    "num_detection_tokens": 6,
    "drop_path_rate": 0.0,
    "adapter_rank": 8,
    "upsample_groups": 32,
    "context_size": 8,
    "index_kpool": 2,
    "entity_vocab_size": 20,
    "num_pos_feats": 16,
    "base_channels": 32,
    "expert_ffn_hidden_size": 16,
}


# Fields whose None means something large, or nothing at all, where others are small.
EVEN_IF_NONE = {
    "head_dim",
    "num_key_value_heads",
    "prediction_length",
    *_EXPERTS_USED.split(),
    *_EXPERTS.split(),
}

# What the generic config does not say, or says wrongly: type → fields; a nested mapping is for a sub-config.
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_GLOBAL = {"global_head_dim": 8, "num_global_key_value_heads": 2}
_WINDOWS = {"window_size": 16}
_STAGES = {"image_size": 2 * SIDE, "patch_size": 2, "depths": (2, 1, 1, 1), "num_heads": (2, 4, 8, 16)}
_FOUR_STAGES = {"backbone_config": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "cosmos3_edge_text",
            "glm4v_text",
            "glm_image_text",
            "glm_ocr_text",
            "qwen2_5_omni_text",
            "qwen2_5_vl_text",
            "qwen2_vl_text",
        ),
        _MROPE,
    ),
    "glm4v_moe_text": {"rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [1, 1, 0]}},
    **dict.fromkeys(("exaone4_5_vision", "qwen2_5_omni_vision_encoder", "qwen2_5_vl_vision"), _WINDOWS),
    **dict.fromkeys(
        ("diffusion_gemma_text", "embedding_gemma2_text", "gemma4_text", "gemma4_unified_text"), _GLOBAL
    ),
    **dict.fromkeys(("chmv2", "depth_anything", "prompt_depth_anything", "tipsv2_dpt"), _FOUR_STAGES),
    "audio-spectrogram-transformer": {"max_length": 40, "frequency_stride": 4, "time_stride": 4},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "bridgetower": {"hidden_size": 128, "num_attention_heads": 4},
    "bridgetower_text_model": {"hidden_size": 128},
    "bridgetower_vision_model": {"hidden_size": 128},
    "bros": {"hidden_size": 128},
    "chameleon": {"vocabulary_map": {"<image>": 98}},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4},
    },
    "dia": {"delay_pattern": [0, 1, 2]},
    "dots1": {"n_shared_experts": 1, "moe_intermediate_size": 16, "n_routed_experts": 4},
    "emu3": {"vocabulary_map": {"<image>": 98}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "moe_num_experts": 4},
    "esm": {"vocab_size": WORDS, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": HEADS},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": WIDTH // 4}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "janus_vqgan": {"channel_multiplier": (1, 1), "num_patches": 8},
    "layoutlmv3": {"input_size": SIDE},
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
    },
    "lilt": {"hidden_size": 48, "intermediate_size": 48},
    "moonshine_streaming": {"num_key_value_heads": HEADS},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "mpnet": {"relative_attention_num_buckets": 32},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 3 * PATCH * PATCH},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 3 * PATCH * PATCH},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 94, "vision_end_token_id": 93},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 94, "vision_end_token_id": 93},
    "recurrent_gemma": {"num_hidden_layers": 4, "block_types": ("recurrent", "attention")},
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds_dim": (16, 16),
        "axial_pos_shape": (8, 8),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "bert-generation": {"is_decoder": True},
    "seggpt": {"image_size": [2 * SIDE, SIDE]},
    **dict.fromkeys(("donut-swin", "maskformer-swin", "swin", "swinv2"), _STAGES),
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "udop": {"relative_attention_num_buckets": 32},
    "wav2vec2-bert": {"vocab_size": WORDS},
    "wav2vec2-conformer": {"vocab_size": WORDS},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": HEADS,
    },
    "zamba2": {
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": HEADS,
    },
    "zaya": {"num_experts_per_tok": 1},
}
CLASSES: dict[str, str] = {
    "detr": "DetrForObjectDetection",
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "slanet": "SLANetForTableRecognition",
    "superpoint": "SuperPointForKeypointDetection",
    "superglue": "SuperGlueForKeypointMatching",
    "vitmatte": "VitMatteForImageMatting",
    "vitpose": "VitPoseForPoseEstimation",
    "voxtral_realtime_text": "VoxtralRealtimeTextForCausalLM",
    "colpali": "ColPaliForRetrieval",
    "colqwen2": "ColQwen2ForRetrieval",
}
