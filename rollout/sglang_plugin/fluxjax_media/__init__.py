"""An extension of SGLang: its servers of Qwen2.5-VL, Qwen3-VL and Qwen3.5 take media as the trainer computed them.

Start a server with this folder's parent on its PYTHONPATH, `SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=fluxjax_media` and
`SGLANG_VLM_CACHE_SIZE_MB=0`, as `rollout.local_server` does. The folder, which needs no other, may be copied to a host.
"""
