-- How many leading blocks of a chain each worker of one shard can go on from.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   the chain's block hashes, 16 bytes each, without anything between
-- ARGV[2]   1: each worker's blocks are prefix-closed; 0: an entry stands for itself (protocol.py)
-- returns   {next, worker, depth, worker, depth, ...}: next is 1 when a further shard exists;
--           workers that hold none of the chain are left out
--
-- If they are prefix-closed, the set of holders only shrinks with depth. The look-up then gallops
-- (1, 2, 4, ...) until nobody is left and halves the gap in which a worker was lost: about
-- 2 log2(depth) reads where all workers agree, at most that for each worker. Else it goes from the
-- deepest block up until it has found every worker.
local state, chain = KEYS[1], ARGV[1]
local head = redis.call('HMGET', state, 'next', 'live')
local reply = {tonumber(head[1] or 0)}
local live = tonumber(head[2] or 0)
local count = math.floor(#chain / 16)
local buckets = state .. ':b:'

-- The slots that hold the block at depth `depth`, which starts at 1; dropped ones among them.
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

-- All of `mask` hold block `low`, none of it holds block `high`.
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
