/* Executes vpdpbusd (AVX-VNNI) and vpdpbssd (AVX-VNNI-INT8) on ymm registers for a CPU that has neither: a SIGILL handler that
   does what the instruction would have done to the interrupted thread's registers, counts it, and steps over it.
   Formats: Intel SDM 2, "VPDPBUSD", "VPDPB[SU,UU,SS]D[,S]", and 2.3 (VEX prefix); SDM 1, 13.4 (XSAVE area). */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

enum { XMM = 160, HEADER = 512, YMM_HIGH = 576 }; /* offsets in the XSAVE area of a signal frame */
static const int GENERAL[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
static uint64_t counts[2]; /* of vpdpbusd, of vpdpbssd */

static void load(uint8_t *to, const uint8_t *area, int i) {
  memcpy(to, area + XMM + 16 * i, 16);
  memcpy(to + 16, area + YMM_HIGH + 16 * i, 16);
}

/* The address of a memory operand; *length grows by its SIB byte and displacement. */
static const uint8_t *address(const uint8_t *code, const greg_t *general, int *length) {
  int x = !(code[1] >> 6 & 1), b = !(code[1] >> 5 & 1), mod = code[4] >> 6, rm = code[4] & 7;
  int has_base = 1, base = rm | b << 3, at = *length;
  int64_t sum = 0;
  if (rm == 4) {
    int sib = code[at++], index = (sib >> 3 & 7) | x << 3;
    base = (sib & 7) | b << 3;
    has_base = !((sib & 7) == 5 && mod == 0);
    if (index != 4) sum += (int64_t)general[GENERAL[index]] << (sib >> 6);
  } else if (rm == 5 && mod == 0) {
    has_base = 0;
  }
  int32_t far = 0;
  if (mod == 1) {
    far = (int8_t)code[at++];
  } else if (mod == 2 || !has_base) {
    memcpy(&far, code + at, 4);
    at += 4;
  }
  if (has_base) sum += general[GENERAL[base]];
  if (rm == 5 && mod == 0) sum += (int64_t)(code + at); /* relative to the next instruction */
  *length = at;
  return (const uint8_t *)(sum + far);
}

static int emulate(ucontext_t *context) {
  greg_t *general = context->uc_mcontext.gregs;
  uint8_t *area = (uint8_t *)context->uc_mcontext.fpregs;
  const uint8_t *code = (const uint8_t *)general[REG_RIP];
  int prefix = code[2] & 3; /* 1: 66, 3: F2 */
  int known = code[0] == 0xC4 && (code[1] & 31) == 2 && !(code[2] >> 7) && (code[2] >> 2 & 1) && code[3] == 0x50;
  if (!known || !(prefix == 1 || prefix == 3)) return 0;
  int length = 5, to = (code[4] >> 3 & 7) | !(code[1] >> 7) << 3, first = ~(code[2] >> 3) & 15;
  uint8_t a[32], b[32];
  int32_t sums[8];
  load((uint8_t *)sums, area, to);
  load(a, area, first);
  if (code[4] >> 6 == 3)
    load(b, area, (code[4] & 7) | !(code[1] >> 5 & 1) << 3);
  else
    memcpy(b, address(code, general, &length), 32);
  for (int i = 0; i < 32; i++) {
    int32_t left = prefix == 3 ? (int8_t)a[i] : a[i];
    sums[i / 4] = (int32_t)((uint32_t)sums[i / 4] + (uint32_t)(left * (int8_t)b[i]));
  }
  memcpy(area + XMM + 16 * to, sums, 16);
  memcpy(area + YMM_HIGH + 16 * to, sums + 4, 16);
  *(uint64_t *)(area + HEADER) |= 6; /* both halves are to be restored */
  __atomic_add_fetch(&counts[prefix == 3], 1, __ATOMIC_RELAXED);
  general[REG_RIP] += length;
  return 1;
}

static void handle(int number, siginfo_t *info, void *context) {
  if (!emulate(context)) signal(SIGILL, SIG_DFL); /* met again, it ends the process */
}

int vnni_install(void) {
  struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
  return sigaction(SIGILL, &action, 0);
}

uint64_t vnni_count(int which) { return counts[which]; }
