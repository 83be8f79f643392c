-- Returns the entries of one worker in a range of buckets.
--
-- KEYS[1]   the shard's state, see redis.py; bucket keys are made from it, in the same hash slot
-- ARGV[1]   worker id
-- ARGV[2]   the first bucket, 0 to 65535
-- ARGV[3]   the bucket after the last one
-- ARGV[4]   limit on the number of entries plus the number of buckets that are read; the bucket
--           that reaches the limit is read to its end
-- returns   {end, entries}: buckets were read up to `end`, `end` excluded; `entries` is one string
--           with the worker's entries, 10 bytes each. {} if this shard does not have the worker
local state = KEYS[1]
local slot = redis.call('HGET', state, 'slot:' .. ARGV[1])
if not slot then return {} end
local mine = bit.lshift(1, tonumber(slot))

local buckets = state .. ':b:'
local at, last, budget = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local found = {}
repeat
  local name = string.char(math.floor(at / 256), at % 256)
  local entries = redis.call('HGETALL', buckets .. name)
  for i = 1, #entries, 2 do
    if bit.band(tonumber(entries[i + 1]), mine) ~= 0 then
      found[#found + 1] = name .. entries[i]
    end
  end
  budget = budget - 1 - #entries / 2
  at = at + 1
until at >= last or budget <= 0
return {at, table.concat(found)}
