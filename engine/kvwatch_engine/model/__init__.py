"""Everything that computes: loading a model, its forward pass over the paged cache, sampling.

    loader.py           load_model: from a name to a `LoadedModel`
    sources.py          what a name means: folder, hub, GGUF file, the embedded model
    config_file.py      config.json, and what no path can compute
    lean.py, parts.py   a folder for our own decoder; what any path makes of a folder
    transformers_backend/  any other decoder of transformers over the paged cache
    gguf_conversion.py  GGUF file -> Hugging Face folder, once and atomically
    weights.py          safetensors -> fused weights
    fingerprint.py      what makes two sets of weights the same
    generation.py       end tokens and sampling defaults
    dtypes.py           which dtype this CPU multiplies fast
    decoder_config.py   shape of a decoder, read from the model's configuration
    decoder.py          forward pass over packed tokens
    linear.py  rope.py  its two building blocks
    adapters.py         LoRA adapters in memory; lora_files.py, lora_config.py read them, lora.py computes
    causal_model.py     what the runner needs of a model's layers, whoever computes them
    attention.py        the only door to the attention kernels
    runner.py           one step: copies, forward, sampling
    sampler.py          logits -> tokens; logit_changes.py, drawing.py, logprobs.py are its parts

Of memory, only `kv_cache` is used.
"""
