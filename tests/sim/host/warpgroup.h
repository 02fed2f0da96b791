// Hopper's asynchronous products, and registers that warpgroups exchange.
//
// Each warp computes its 16 of the 64 rows when it waits for them, or when it ends the group of
// products. It doesn't meet the other warps for that, so that nothing is seen of theirs without a
// barrier; but all four must do the same steps in the same order. Until the wait, the registers of
// sums hold NaN and can't be touched, and what the product reads must stay as it is.
#pragma once

#include "sim.h"

namespace sim {

// What a lane brings to a product.
struct ProductOperand {
  float* sums;
  const u32* registers;  // of the left factor; null: it is in shared memory
  u64 a, b;
  bool accumulate;
};

// From the bits of an element to its value.
using Widen = float (*)(unsigned short);

void begin_product(const char* what, ProductOperand operand, int columns, bool transposed,
                   Widen widen);
void fence_products();
void end_product_group();
void wait_for_products(size_t left);

// Reports if registers are those of sums that are still being computed.
void require_not_pending(const char* what, const void* registers, size_t size);

void change_registers(const char* what, int count, bool increase);

// --- A block ----------------------------------------------------------------------------------

void begin_warpgroups();
void end_warpgroups();

}  // namespace sim
