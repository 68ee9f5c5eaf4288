// Reports whether the instruction set that this file is compiled for may be used. It is built and called first: it
// shows quickly that the compiler supports the instructions, and that the system permits them.
#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#pragma GCC visibility push(default)

extern "C" int quire_permitted() {
#if defined(__AMX_TILE__)
  // Linux enables the tile registers for a process on request.
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
#else
  return 1;
#endif
}

#pragma GCC visibility pop
