-- Applies one batch of a worker's log. Changes nothing if the batch is not the next one.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   worker id
-- ARGV[2]   epoch of the log
-- ARGV[3]   sequence number of the batch
-- ARGV[4]   hashes of the stored blocks, 16 bytes each, parents before children
-- ARGV[5]   hashes of the removed blocks, 16 bytes each, children before parents
-- ARGV[6]   1: with this batch, the log has all blocks that the worker holds
-- returns   1: the batch was applied. 0: nothing was changed, because the sequence number is not
--           the next one, the epoch is not the log's, or this shard does not have the worker
local state = KEYS[1]
local slot = redis.call('HGET', state, 'slot:' .. ARGV[1])
if not slot then return 0 end
local log = redis.call('HMGET', state, 'epoch:' .. slot, 'seq:' .. slot)
if log[1] ~= ARGV[2] or tonumber(log[2]) ~= tonumber(ARGV[3]) then return 0 end

local buckets = state .. ':b:'
local mine = bit.lshift(1, tonumber(slot))
-- `added`: change of the number of this worker's blocks; `fresh`: change of the number of entries
local added, fresh = 0, 0

-- Caches the text of each mask: a look-up in a Lua table is faster than Redis's conversion of a
-- number to text.
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

-- Stores the blocks with few calls: one call for a new block, two for a block that other workers
-- hold. `shared` predicts which case applies: once a prompt differs from the prompts that others
-- hold, all its later blocks are new. So a block is most likely in the same case as the one before.
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

-- Heartbeats are empty and are not appended, so that an idle cluster wakes no router.
local completes = ARGV[6] == '1' and redis.call('HGET', state, 'complete:' .. slot) ~= ARGV[2]
if completes then redis.call('HSET', state, 'complete:' .. slot, ARGV[2]) end
if completes or ARGV[4] ~= '' or ARGV[5] ~= '' then
  append(state, 'kind', 'blocks', 'worker', ARGV[1], 'epoch', ARGV[2], 'stored', ARGV[4],
    'removed', ARGV[5], 'complete', completes and 1 or 0)
end
return 1
