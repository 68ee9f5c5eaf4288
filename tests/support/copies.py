"""What GPU kernels copy from the card's memory, counted in Pallas' interpreter."""

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


def counted(monkeypatch) -> list:
    """The arrays that kernels copy to shared memory from now on."""
    copied = []
    execute = gpu_callbacks.DeviceLocalMemoryTransfer.execute

    def watched(self, token):
        done = execute(self, token)
        copied.append(self.data)
        return done

    monkeypatch.setattr(gpu_callbacks.DeviceLocalMemoryTransfer, "execute", watched)
    return copied
