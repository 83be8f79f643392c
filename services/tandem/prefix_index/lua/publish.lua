-- Applies one batch of a worker's log, or nothing when the batch is not the next one.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   worker id
-- ARGV[2]   epoch of the log
-- ARGV[3]   sequence number of the batch
-- ARGV[4]   hashes of blocks stored, 16 bytes each, parents first
-- ARGV[5]   hashes of blocks removed, 16 bytes each, children first
-- returns   1 applied; 0 a gap, a repeat, another epoch or a worker that is not here: no change
local state = KEYS[1]
local slot = redis.call('HGET', state, 'slot:' .. ARGV[1])
if not slot then return 0 end
local log = redis.call('HMGET', state, 'epoch:' .. slot, 'seq:' .. slot)
if log[1] ~= ARGV[2] or tonumber(log[2]) ~= tonumber(ARGV[3]) then return 0 end

local buckets = state .. ':b:'
local mine = bit.lshift(1, tonumber(slot))
local added, fresh = 0, 0 -- entries of this worker, and entries that nobody had

-- A number takes Redis longer to write out than Lua to find its text.
local texts = {}
local function text_of(mask)
  local text = texts[mask]
  if not text then
    text = string.format('%d', mask)
    texts[mask] = text
  end
  return text
end

local function each(hashes, change)
  for at = 1, #hashes, 16 do
    change(buckets .. hashes:sub(at, at + 1), hashes:sub(at + 2, at + 9))
  end
end

-- Chains part from what others hold and never meet it again, so a block is most likely as new, or
-- as shared, as the one before it: one call for a new block, two for a shared one.
local alone = text_of(mine)
local shared = false
each(ARGV[4], function(bucket, field)
  if not shared and redis.call('HSETNX', bucket, field, alone) == 1 then
    added, fresh = added + 1, fresh + 1
    return
  end
  local mask = redis.call('HGET', bucket, field)
  shared = mask ~= false
  if not shared then
    redis.call('HSET', bucket, field, alone)
    added, fresh = added + 1, fresh + 1
  elseif bit.band(tonumber(mask), mine) == 0 then
    redis.call('HSET', bucket, field, text_of(bit.bor(tonumber(mask), mine)))
    added = added + 1
  end
end)

each(ARGV[5], function(bucket, field)
  local mask = tonumber(redis.call('HGET', bucket, field) or 0)
  if bit.band(mask, mine) == 0 then return end
  if mask == mine then
    redis.call('HDEL', bucket, field)
    fresh = fresh - 1
  else
    redis.call('HSET', bucket, field, text_of(bit.bxor(mask, mine)))
  end
  added = added - 1
end)

redis.call('HINCRBY', state, 'blocks:' .. slot, added)
redis.call('HINCRBY', state, 'entries', fresh)
redis.call('HSET', state, 'seq:' .. slot, ARGV[3] + 1, 'seen:' .. slot, redis.call('TIME')[1])
return 1
