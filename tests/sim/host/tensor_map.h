// Copies of boxes that tensor maps describe, as tests/sim/tensor_map.py encodes them.
#pragma once

#include "sim.h"

namespace sim {

void prefetch(const void* map);
void tma_load(void* to, const void* map, const u64* barrier, const std::vector<int>& coordinates);
void tma_store(const void* map, const void* from, const std::vector<int>& coordinates);

}  // namespace sim
