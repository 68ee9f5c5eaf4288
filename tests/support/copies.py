"""Copies of GPU kernels from device memory, recorded in Pallas' interpreter."""

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks


def record_copies(monkeypatch) -> list:
    """A list that collects the arrays which kernels copy to shared memory."""
    copied = []
    execute = gpu_callbacks.DeviceLocalMemoryTransfer.execute

    def recording_execute(self, token):
        result = execute(self, token)
        copied.append(self.data)
        return result

    monkeypatch.setattr(gpu_callbacks.DeviceLocalMemoryTransfer, "execute", recording_execute)
    return copied
