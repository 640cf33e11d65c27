/* Executes AMX (tiles, INT8 and BF16 products) for a CPU that has none: a SIGILL handler that does to the interrupted thread's
   tiles what the instruction would have done, checks what the hardware checks, counts, and steps over it. What hardware
   refuses, an unconfigured tile or shapes that do not fit, ends the process, as there.
   Formats: Intel SDM 2, "LDTILECFG" to "TILEZERO", "TDPB[SU,US,UU,SS]D", "TDPBF16PS"; 2.3 (VEX prefix); SDM 1, 18 (AMX). */
#define _GNU_SOURCE
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };
enum { CONFIGURED, RELEASED, ZEROED, LOADED, STORED, INT8, BF16, KINDS };
static const int GENERAL[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
struct config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static __thread struct config config; /* palette 0: none */
static __thread uint8_t tile[TILES][ROWS][ROW_BYTES];
static uint64_t counts[KINDS];

static int refuse(const char *why) {
  fprintf(stderr, "amx_emulator: %s\n", why);
  return 0;
}

static int executed(int kind) {
  __atomic_add_fetch(&counts[kind], 1, __ATOMIC_RELAXED);
  return 1;
}

/* The operands of a VEX instruction (0F38 map) with its ModRM byte at code[4]. */
struct operands {
  int prefix, reg, rm, vvvv, memory, has_index, length;
  int64_t base, index; /* of a memory operand, displacement and scale included */
};

static int decode(const uint8_t *code, const greg_t *general, struct operands *o) {
  int x = !(code[1] >> 6 & 1), b = !(code[1] >> 5 & 1), mod = code[4] >> 6, rm = code[4] & 7, at = 5;
  if (code[0] != 0xC4 || (code[1] & 31) != 2 || code[2] >> 7 || (code[2] >> 2 & 1)) return 0; /* W 0, L 0 */
  *o = (struct operands){.prefix = code[2] & 3, .vvvv = ~(code[2] >> 3) & 15, .memory = mod != 3};
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

static int usable(int i) { return i < TILES && config.palette && config.rows[i]; }

static int configure(const struct config *given) {
  struct config c = *given;
  if (c.palette == 0) {
    memset(&config, 0, sizeof config);
    return executed(RELEASED);
  }
  if (c.palette != 1 || c.start_row) return refuse("ldtilecfg: only palette 1, from row 0");
  for (int i = 0; i < 14; i++)
    if (c.reserved[i]) return refuse("ldtilecfg: reserved bytes must be zero");
  for (int i = 0; i < 16; i++) {
    if (c.rows[i] > ROWS || c.row_bytes[i] > ROW_BYTES || !c.rows[i] != !c.row_bytes[i])
      return refuse("ldtilecfg: no such shape");
    if (i >= TILES && c.rows[i]) return refuse("ldtilecfg: there are eight tiles");
    if (c.row_bytes[i] % 4) return refuse("ldtilecfg: rows are whole elements");
  }
  if (config.palette) return refuse("ldtilecfg: this thread has not released its tiles");
  config = c;
  memset(tile, 0, sizeof tile);
  return executed(CONFIGURED);
}

static int move(const struct operands *o) {
  if (!usable(o->reg)) return refuse("a tile that is not configured");
  for (int r = 0; r < ROWS; r++) {
    uint8_t *at = (uint8_t *)(o->base + r * o->index), *row = tile[o->reg][r];
    int inside = r < config.rows[o->reg];
    if (o->prefix == 2) { /* tilestored */
      if (inside) memcpy(at, row, config.row_bytes[o->reg]);
    } else { /* tileloadd, and with the hint not to keep */
      memset(row, 0, ROW_BYTES);
      if (inside) memcpy(row, at, config.row_bytes[o->reg]);
    }
  }
  return executed(o->prefix == 2 ? STORED : LOADED);
}

/* Shapes as the SDM wants them: C m x n, A m x k, B k x n, in elements of four bytes. */
static int shaped(int c, int a, int b) {
  if (!usable(c) || !usable(a) || !usable(b)) return refuse("a product of tiles that are not configured");
  if (c == a || c == b || a == b) return refuse("a product needs three tiles");
  if (config.rows[a] != config.rows[c] || config.row_bytes[b] != config.row_bytes[c] ||
      config.rows[b] != config.row_bytes[a] / 4)
    return refuse("a product of tiles whose shapes do not fit");
  return 1;
}

static int multiply_int8(int prefix, int c, int a, int b) {
  int left_signed = prefix >= 2, right_signed = prefix & 1; /* none: uu, 66: us, F3: su, F2: ss */
  if (!shaped(c, a, b)) return 0;
  for (int m = 0; m < config.rows[c]; m++) {
    uint32_t sums[ROWS];
    memcpy(sums, tile[c][m], sizeof sums);
    for (int i = 0; i < config.row_bytes[a]; i++) {
      int left = left_signed ? (int8_t)tile[a][m][i] : tile[a][m][i];
      for (int n = 0; n < config.row_bytes[c] / 4; n++) {
        uint8_t right = tile[b][i / 4][4 * n + i % 4];
        sums[n] += (uint32_t)(left * (right_signed ? (int8_t)right : right));
      }
    }
    memcpy(tile[c][m], sums, config.row_bytes[c]);
  }
  return executed(INT8);
}

static float flushed(float v) { return fpclassify(v) == FP_SUBNORMAL ? copysignf(0, v) : v; }

static float widened(const uint8_t *bf16) {
  uint32_t bits = (uint32_t)(bf16[0] | bf16[1] << 8) << 16;
  float v;
  memcpy(&v, &bits, 4);
  return flushed(v);
}

/* Even and odd products of the step apart, in order of k, each added with one rounding; their sum goes on top of C. */
static int multiply_bf16(int c, int a, int b) {
  if (!shaped(c, a, b)) return 0;
  for (int m = 0; m < config.rows[c]; m++)
    for (int n = 0; n < config.row_bytes[c] / 4; n++) {
      float apart[2] = {0, 0}, sum;
      for (int i = 0; i < config.row_bytes[a] / 2; i++) {
        float left = widened(tile[a][m] + 2 * i), right = widened(tile[b][i / 2] + 4 * n + 2 * (i % 2));
        apart[i % 2] = flushed(fmaf(left, right, apart[i % 2]));
      }
      memcpy(&sum, tile[c][m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(apart[0] + apart[1]));
      memcpy(tile[c][m] + 4 * n, &sum, 4);
    }
  return executed(BF16);
}

static int emulate(ucontext_t *context) {
  greg_t *general = context->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)general[REG_RIP];
  struct operands o;
  int done = 0, opcode = code[3], sib = (code[4] & 7) == 4;
  if (!decode(code, general, &o)) return 0;
  if (opcode == 0x49 && o.prefix == 0 && o.memory) {
    done = configure((const struct config *)(o.base + o.index));
  } else if (opcode == 0x49 && o.prefix == 0 && code[4] == 0xC0) {
    if (!config.palette) return refuse("tilerelease: nothing was configured");
    memset(&config, 0, sizeof config);
    done = executed(RELEASED);
  } else if (opcode == 0x49 && o.prefix == 3 && !o.memory && o.rm == 0) {
    done = usable(o.reg) ? executed(ZEROED) : refuse("a tile that is not configured");
    if (done) memset(tile[o.reg], 0, sizeof tile[o.reg]);
  } else if (opcode == 0x4B && o.prefix && o.memory && sib) {
    done = move(&o);
  } else if (opcode == 0x5E && !o.memory) {
    done = multiply_int8(o.prefix, o.reg, o.rm, o.vvvv);
  } else if (opcode == 0x5C && !o.memory && o.prefix == 2) {
    done = multiply_bf16(o.reg, o.rm, o.vvvv);
  }
  if (done) general[REG_RIP] += o.length;
  return done;
}

static void handle(int number, siginfo_t *info, void *context) {
  if (!emulate(context)) signal(SIGILL, SIG_DFL); /* met again, it ends the process */
}

int amx_install(void) {
  struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
  return sigaction(SIGILL, &action, 0);
}

uint64_t amx_count(int kind) { return counts[kind]; }
