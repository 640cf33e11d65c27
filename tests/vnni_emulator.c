/* Executes vpdpbusd (AVX-VNNI) and vpdpbssd (AVX-VNNI-INT8) on ymm registers for a CPU that has neither: a SIGILL handler that
   does what the instruction would have done to the interrupted thread's registers, counts it, and steps over it.
   Formats: Intel SDM 2, "VPDPBUSD", "VPDPB[SU,UU,SS]D[,S]"; SDM 1, 13.4 (XSAVE area). */
#include "sigill.h"

enum { XMM = 160, HEADER = 512, YMM_HIGH = 576 }; /* offsets in the XSAVE area of a signal frame */
static uint64_t counts[2]; /* of vpdpbusd, of vpdpbssd */

static void load(uint8_t *to, const uint8_t *area, int i) {
  memcpy(to, area + XMM + 16 * i, 16);
  memcpy(to + 16, area + YMM_HIGH + 16 * i, 16);
}

static int emulate(ucontext_t *context) {
  greg_t *general = context->uc_mcontext.gregs;
  uint8_t *area = (uint8_t *)context->uc_mcontext.fpregs;
  const uint8_t *code = (const uint8_t *)general[REG_RIP];
  struct operands o;
  if (!decode(code, general, &o) || !o.wide || code[3] != 0x50) return 0;
  if (!(o.prefix == 1 || o.prefix == 3)) return 0; /* 66, F2 */
  uint8_t a[32], b[32];
  int32_t sums[8];
  load((uint8_t *)sums, area, o.reg);
  load(a, area, o.vvvv);
  if (o.memory)
    memcpy(b, (const uint8_t *)(o.base + o.index), 32);
  else
    load(b, area, o.rm);
  for (int i = 0; i < 32; i++) {
    int32_t left = o.prefix == 3 ? (int8_t)a[i] : a[i];
    sums[i / 4] = (int32_t)((uint32_t)sums[i / 4] + (uint32_t)(left * (int8_t)b[i]));
  }
  memcpy(area + XMM + 16 * o.reg, sums, 16);
  memcpy(area + YMM_HIGH + 16 * o.reg, sums + 4, 16);
  *(uint64_t *)(area + HEADER) |= 6; /* both halves are to be restored */
  __atomic_add_fetch(&counts[o.prefix == 3], 1, __ATOMIC_RELAXED);
  general[REG_RIP] += o.length;
  return 1;
}

int vnni_install(void) { return install(); }

uint64_t vnni_count(int which) { return counts[which]; }
