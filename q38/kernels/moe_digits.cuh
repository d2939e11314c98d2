// Activations as two signed 8-bit digits, and their product with 2-bit codes on INT8 tensor cores (decode only).
//
// An input x of a group of 128 becomes n = round(x s), s a power of two of the group that puts its largest |n| below
// 2^14, and n = 256 hi + lo. Codes i = 0..3 of a byte are taken by (w & 0x03030303) and (w & 0x0c0c0c0c) of a word and
// of the word shifted by 4; the second mask gives 4 q, so inputs of odd i are stored as round(x s / 4). Products and
// sums are exact integers; the error is that of n: at most 2^-13 of the group's largest input, 2^-15 for even i.
//
// Packed: per word row (16 inputs) 4 words of high digits and 4 of low ones; word i holds inputs i, 4 + i, 8 + i, 12 + i.

#define DIGIT_MASK 0x03030303u

struct Start {  // of an accumulator: the zero point, -2 times the sum of the digits
  int high, low;
};

// A lane's four inputs of one group: 16 kw + i, + 4, + 8, + 12 with kw = lane / 4, i = lane % 4.
__device__ __forceinline__ float4 load_spread(const u16* x, int group, int lane) {
  const u16* p = x + group * 128 + (lane >> 2) * 16 + (lane & 3);
  const u16 a = p[0], b = p[4], c = p[8], d = p[12];
#if ACT_BF16
  return make_float4(__uint_as_float((u32)a << 16), __uint_as_float((u32)b << 16), __uint_as_float((u32)c << 16),
                     __uint_as_float((u32)d << 16));
#else
  return make_float4(half_to_float(a), half_to_float(b), half_to_float(c), half_to_float(d));
#endif
}

__device__ __forceinline__ float4 load_spread(const float* x, int group, int lane) {
  const float* p = x + group * 128 + (lane >> 2) * 16 + (lane & 3);
  return make_float4(p[0], p[4], p[8], p[12]);
}

// Pack one group; every lane gets its start and `back`, what one unit of n is worth (NaN if an input is not finite).
__device__ __forceinline__ Start pack_digits(u32* packed, float4 v, int lane, float& back) {
  const u32 largest = max(max(__float_as_uint(v.x) & 0x7fffffffu, __float_as_uint(v.y) & 0x7fffffffu),
                          max(__float_as_uint(v.z) & 0x7fffffffu, __float_as_uint(v.w) & 0x7fffffffu));
  const u32 exponent = __reduce_max_sync(0xffffffffu, largest) >> 23;
  const u32 field = min(267u - exponent, 240u);  // bounded so that its inverse is normal
  const bool odd = lane & 1;
  const float scale = __uint_as_float((odd ? field - 2 : field) << 23);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits; 128 more makes the high digit round.
  const float magic = 12582912.f;
  const int a = __float_as_int(fmaf(v.x, scale, magic)), b = __float_as_int(fmaf(v.y, scale, magic)),
            c = __float_as_int(fmaf(v.z, scale, magic)), d = __float_as_int(fmaf(v.w, scale, magic));
  const u32 low = __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
  const u32 high = __byte_perm(__byte_perm(a + 128, b + 128, 0x0051), __byte_perm(c + 128, d + 128, 0x0051), 0x5410);
  u32* to = packed + (lane >> 2) * 8 + (lane & 3);
  to[0] = high;
  to[4] = low;
  const int unit = odd ? -8 : -2;
  Start start;
  start.high = __reduce_add_sync(0xffffffffu, __dp4a((int)high, 0x01010101, 0) * unit);
  start.low = __reduce_add_sync(0xffffffffu, __dp4a((int)low, 0x01010101, 0) * unit);
  back = exponent == 255 ? __int_as_float(0x7fc00000) : __uint_as_float((254u - field) << 23);
  return start;
}

__device__ __forceinline__ void mma_digits(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const int* c) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// One 16-byte load of words, four columns, against one word row of inputs: two tiles of 16 columns, two k-steps,
// added to `from` (the group's start, or acc itself).
__device__ __forceinline__ void multiply_words(int (&acc)[2][4], uint4 w, uint4 x, const int* from0, const int* from1) {
  const u32 m = DIGIT_MASK, n = DIGIT_MASK << 2;
  mma_digits(acc[0], w.x & m, w.y & m, w.x & n, w.y & n, x.x, x.y, from0);
  mma_digits(acc[1], w.z & m, w.w & m, w.z & n, w.w & n, x.x, x.y, from1);
  const u32 p = w.x >> 4, q = w.y >> 4, r = w.z >> 4, s = w.w >> 4;
  mma_digits(acc[0], p & m, q & m, p & n, q & n, x.z, x.w, acc[0]);
  mma_digits(acc[1], r & m, s & m, r & n, s & n, x.z, x.w, acc[1]);
}

__device__ __forceinline__ float join_digits(int high, int low) { return (float)(high * 256 + low); }

// out += scale * back * acc for the lane's token and its four columns (two tiles, rows g and g + 8).
__device__ __forceinline__ void add_scaled(float4& out, const int (&acc)[2][4], uint2 s, float back) {
  out.x += scale_low(s.x) * (back * join_digits(acc[0][0], acc[0][1]));
  out.y += scale_high(s.x) * (back * join_digits(acc[0][2], acc[0][3]));
  out.z += scale_low(s.y) * (back * join_digits(acc[1][0], acc[1][1]));
  out.w += scale_high(s.y) * (back * join_digits(acc[1][2], acc[1][3]));
}
