-- Functions that take slots away from their workers. redis.py puts this text before reset.lua and
-- sweep.lua.
--
-- drop: takes a slot from its worker. From then on, look-ups ignore the slot's bit in the masks. If
-- the worker has no blocks, another worker can use the slot at once; otherwise only after a sweep.
local function drop(state, slot)
  local owner = redis.call('HGET', state, 'worker:' .. slot)
  local bits = bit.lshift(1, tonumber(slot))
  local live = tonumber(redis.call('HGET', state, 'live') or 0)
  redis.call('HSET', state, 'live', bit.band(live, bit.bnot(bits)))
  if redis.call('HGET', state, 'blocks:' .. slot) ~= '0' then
    local dirty = tonumber(redis.call('HGET', state, 'dirty') or 0)
    redis.call('HSET', state, 'dirty', bit.bor(dirty, bits))
  end
  redis.call('HDEL', state, 'slot:' .. owner, 'worker:' .. slot, 'epoch:' .. slot,
    'seq:' .. slot, 'seen:' .. slot, 'blocks:' .. slot, 'logged:' .. slot, 'complete:' .. slot)
end

local function append_drop(state, worker) append(state, 'kind', 'drop', 'worker', worker) end

-- Drops the slots whose worker has published nothing for more than `silent` seconds.
local function drop_silent(state, silent)
  local now = tonumber(redis.call('TIME')[1])
  local fields = {}
  for slot = 0, 30 do fields[slot + 1] = 'seen:' .. slot end
  for i, seen in ipairs(redis.call('HMGET', state, unpack(fields))) do
    if seen and now - tonumber(seen) > silent then
      append_drop(state, redis.call('HGET', state, 'worker:' .. i - 1))
      drop(state, i - 1)
    end
  end
end

