-- Drops silent workers. Then clears the bits of dropped workers in the next buckets of one shard,
-- so that their slots can be reused.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   limit on the number of entries plus the number of buckets that are read; the bucket
--           that reaches the limit is read to its end
-- ARGV[2]   a worker that has published nothing for more than this many seconds is dropped
-- returns   {left, next}: left is 1 if this shard has more to sweep; next is 1 if another shard
--           exists
--
-- Several calls make one round over all 65,536 buckets. A round clears the bits of the slots that
-- were dirty when it began. A slot that is dropped during a round waits for the next round, because
-- buckets that the round has already passed can still have the slot's bit.
local state = KEYS[1]
drop_silent(state, tonumber(ARGV[2]))
-- Replicas are seconds behind at most, so older entries of the log only take memory. The result is
-- ignored, because the ACL rules of an older version do not allow XTRIM.
redis.pcall('XTRIM', state .. ':log', 'MINID', '~', (redis.call('TIME')[1] - LOG_S) .. '000')
local head = redis.call('HMGET', state, 'next', 'dirty', 'sweeping', 'cursor')
local more, dirty = tonumber(head[1] or 0), tonumber(head[2] or 0)
local sweeping, cursor = tonumber(head[3] or 0), tonumber(head[4] or 0)
if sweeping == 0 then
  if dirty == 0 then return {0, more} end
  sweeping, dirty, cursor = dirty, 0, 0
end

local buckets = state .. ':b:'
local budget = tonumber(ARGV[1])
local swept, freed = 0, 0
while budget > 0 and cursor < 65536 do
  local bucket = buckets .. string.char(math.floor(cursor / 256), cursor % 256)
  local entries = redis.call('HGETALL', bucket)
  for i = 1, #entries, 2 do
    local mask = tonumber(entries[i + 1])
    local kept = bit.band(mask, bit.bnot(sweeping))
    if kept ~= mask then swept = swept + 1 end
    if kept == 0 then
      redis.call('HDEL', bucket, entries[i])
      freed = freed + 1
    elseif kept ~= mask then
      redis.call('HSET', bucket, entries[i], kept)
    end
  end
  budget = budget - 1 - #entries / 2
  cursor = cursor + 1
end
if cursor == 65536 then sweeping = 0 end
redis.call('HINCRBY', state, 'swept', swept)
redis.call('HINCRBY', state, 'entries', 0 - freed) -- not -freed: Redis 6.2 rejects -0
redis.call('HSET', state, 'dirty', dirty, 'sweeping', sweeping, 'cursor', cursor)
return {(sweeping ~= 0 or dirty ~= 0) and 1 or 0, more}
