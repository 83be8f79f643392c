-- Returns for each worker of one shard the number of leading blocks of a prompt that the worker
-- need not compute.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   hashes of the prompt's blocks, concatenated, 16 bytes each
-- ARGV[2]   1: a worker that holds a block holds all blocks before it (prefix-closed);
--           0: an entry says nothing about the blocks before it (protocol.py)
-- returns   {next, worker, depth, worker, depth, ...}: next is 1 if another shard exists; depth is
--           a number of blocks; workers without any of the blocks are left out
--
-- With prefix-closed blocks, a later block never has more holders than an earlier block. The
-- look-up probes growing depths (steps of 1, 2, 4, ...) until no worker holds the block. If a
-- worker holds the block of one probe and not of the next, binary search between the two finds the
-- worker's depth. This needs about 2 log2(depth) reads if all workers have the same depth, and at
-- most as many for each worker otherwise. Without prefix-closed blocks, the look-up goes from the
-- last block to the first until it has found every worker.
local state, chain = KEYS[1], ARGV[1]
local head = redis.call('HMGET', state, 'next', 'live')
local reply = {tonumber(head[1] or 0)}
local live = tonumber(head[2] or 0)
local count = math.floor(#chain / 16)
local buckets = state .. ':b:'

-- Returns the mask of the slots that hold the block at depth `depth`, counted from 1. The mask may
-- include dropped slots.
local function holders(depth)
  local at = (depth - 1) * 16
  local mask = redis.call('HGET', buckets .. chain:sub(at + 1, at + 2), chain:sub(at + 3, at + 10))
  return tonumber(mask or 0)
end

local function report(mask, depth)
  if depth == 0 then return end
  for slot = 0, 30 do
    if bit.band(mask, bit.lshift(1, slot)) ~= 0 then
      reply[#reply + 1] = redis.call('HGET', state, 'worker:' .. slot)
      reply[#reply + 1] = depth
    end
  end
end

-- Reports the depths of the slots in `mask` by binary search. All of them hold the block at depth
-- `low`, and none of them holds the block at depth `high`.
local function narrow(mask, low, high)
  if mask == 0 then return end
  if high - low == 1 then return report(mask, low) end
  local middle = math.floor((low + high) / 2)
  local deeper = bit.band(mask, holders(middle))
  narrow(deeper, middle, high)
  narrow(bit.bxor(mask, deeper), low, middle)
end

if ARGV[2] == '0' then
  local mask = live
  for depth = count, 1, -1 do
    if mask == 0 then break end
    local found = bit.band(mask, holders(depth))
    report(found, depth)
    mask = bit.bxor(mask, found)
  end
  return reply
end

local mask, low, step = live, 0, 1
while mask ~= 0 do
  if low == count then
    report(mask, low)
    break
  end
  local probe = math.min(low + step, count)
  local deeper = bit.band(mask, holders(probe))
  narrow(bit.bxor(mask, deeper), low, probe)
  mask, low, step = deeper, probe, step * 2
end
return reply
