/* Executes AMX (tiles, INT8 and BF16 products) for a CPU that has none: a SIGILL handler that does to the interrupted thread's
   tiles what the instruction would have done, checks what the hardware checks, counts, and steps over it. What hardware
   refuses, an unconfigured tile or shapes that do not fit, ends the process, as there.
   Formats: Intel SDM 2, "LDTILECFG" to "TILEZERO", "TDPB[SU,US,UU,SS]D", "TDPBF16PS"; SDM 1, 18 (AMX). */
#include "sigill.h"

#include <math.h>
#include <stdio.h>

enum { TILES = 8, ROWS = 16, ROW_BYTES = 64 };
enum { CONFIGURED, RESHAPED, RELEASED, ZEROED, LOADED, STORED, INT8, BF16, ROWS_MULTIPLIED, KINDS };
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

static void count(int kind, int n) { __atomic_add_fetch(&counts[kind], (uint64_t)n, __ATOMIC_RELAXED); }

static int executed(int kind) {
  count(kind, 1);
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
  int kind = config.palette ? RESHAPED : CONFIGURED;
  config = c;
  memset(tile, 0, sizeof tile);
  return executed(kind);
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
  count(ROWS_MULTIPLIED, config.rows[c]);
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
  count(ROWS_MULTIPLIED, config.rows[c]);
  return executed(BF16);
}

static int emulate(ucontext_t *context) {
  greg_t *general = context->uc_mcontext.gregs;
  const uint8_t *code = (const uint8_t *)general[REG_RIP];
  struct operands o;
  int done = 0, opcode = code[3], sib = (code[4] & 7) == 4;
  if (!decode(code, general, &o) || o.wide) return 0;
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

int amx_install(void) { return install(); }

uint64_t amx_count(int kind) { return counts[kind]; }
