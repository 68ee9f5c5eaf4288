// Whether the instructions that this was compiled for may be used. It is built and asked first: in a moment it is known
// that there is a compiler that knows them, and that the system lends what they need.
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#pragma GCC visibility push(default)

extern "C" int quire_permitted() {
#if defined(__AMX_TILE__)
  // Linux lends the registers of tiles to a process that asks.
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
#else
  return 1;
#endif
}

#pragma GCC visibility pop
