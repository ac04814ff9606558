"""An engine that is shut down gives its KV cache back."""

from tests.e2e.inside import mapped_mib, mapped_mib_after_shutdown

POOL_MIB = 1024


def test_engine_without_a_connector_frees_its_kv_cache(plain: str, run) -> None:
    engine_args = {"num_gpu_blocks_override": None}
    env = {"VLLM_CPU_KVCACHE_SPACE": str(POOL_MIB // 1024)}
    with run("bare", plain, engine_args=engine_args, env=env) as engine:
        before = engine.call(mapped_mib)
        after = engine.call(mapped_mib_after_shutdown)
    assert before - after >= POOL_MIB
