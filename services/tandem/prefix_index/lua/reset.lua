-- Drops a worker from one shard. If an epoch is given, starts a new log for the worker in a free
-- slot of the shard. A free slot is not live, dirty or sweeping (redis.py).
--
-- KEYS[1]   the shard's state, see redis.py
-- ARGV[1]   worker id
-- ARGV[2]   epoch of the new log; empty: only drop the worker
-- ARGV[3]   if no slot is free, workers that were silent for more than this many seconds are
--           dropped first
-- returns   {placed, next}: placed is 1 if the log was started in this shard, at sequence number 0;
--           next is 1 if another shard exists or must be tried because this shard is full
local state, worker, epoch = KEYS[1], ARGV[1], ARGV[2]

local function mask_of(name) return tonumber(redis.call('HGET', state, name) or 0) end

local function clean_slot()
  local taken = bit.bor(mask_of('live'), mask_of('dirty'), mask_of('sweeping'))
  for slot = 0, 30 do
    if bit.band(taken, bit.lshift(1, slot)) == 0 then return slot end
  end
end

local held = redis.call('HGET', state, 'slot:' .. worker)
if held then drop(state, held) end
local more = mask_of('next')
if epoch == '' then
  if held then append_drop(state, worker) end
  return {0, more}
end

local slot = clean_slot()
if not slot then
  drop_silent(state, tonumber(ARGV[3]))
  slot = clean_slot()
end
if not slot then
  if held then append_drop(state, worker) end
  redis.call('HSET', state, 'next', 1)
  return {0, 1}
end
redis.call('HSET', state, 'slot:' .. worker, slot, 'worker:' .. slot, worker,
  'epoch:' .. slot, epoch, 'seq:' .. slot, 0, 'seen:' .. slot, redis.call('TIME')[1],
  'blocks:' .. slot, 0, 'logged:' .. slot, epoch,
  'live', bit.bor(mask_of('live'), bit.lshift(1, slot)))
append(state, 'kind', 'reset', 'worker', worker, 'epoch', epoch)
return {1, more}
