/* What emulators of instructions share: the operands of a VEX instruction, and a SIGILL handler around `emulate`.
   Formats: Intel SDM 2, 2.1 (ModRM, SIB) and 2.3 (VEX prefix). */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

static const int GENERAL[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

/* The operands of a VEX instruction (0F38 map) with its ModRM byte at code[4]. */
struct operands {
  int prefix, wide, reg, rm, vvvv, memory, has_index, length; /* wide: 256 bits */
  int64_t base, index; /* of a memory operand, displacement and scale included */
};

static int decode(const uint8_t *code, const greg_t *general, struct operands *o) {
  int x = !(code[1] >> 6 & 1), b = !(code[1] >> 5 & 1), mod = code[4] >> 6, rm = code[4] & 7, at = 5;
  if (code[0] != 0xC4 || (code[1] & 31) != 2 || code[2] >> 7) return 0; /* W 0 */
  *o = (struct operands){.prefix = code[2] & 3, .wide = code[2] >> 2 & 1, .vvvv = ~(code[2] >> 3) & 15, .memory = mod != 3};
  o->reg = (code[4] >> 3 & 7) | !(code[1] >> 7) << 3;
  o->rm = rm | b << 3;
  if (o->memory) {
    int base = o->rm, has_base = 1;
    if (rm == 4) {
      int sib = code[at++], index = (sib >> 3 & 7) | x << 3;
      base = (sib & 7) | b << 3;
      has_base = !((sib & 7) == 5 && mod == 0);
      o->has_index = index != 4;
      if (o->has_index) o->index = (int64_t)((uint64_t)general[GENERAL[index]] << (sib >> 6));
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
    o->base = far + (has_base ? general[GENERAL[base]] : 0);
    if (rm == 5 && mod == 0) o->base += (int64_t)(code + at); /* relative to the next instruction */
  }
  o->length = at;
  return 1;
}

static int emulate(ucontext_t *context); /* whether it was one of the instructions; then it is stepped over */

static void handle(int number, siginfo_t *info, void *context) {
  if (!emulate(context)) signal(SIGILL, SIG_DFL); /* met again, it ends the process */
}

static int install(void) {
  struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
  return sigaction(SIGILL, &action, 0);
}
