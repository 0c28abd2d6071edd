-- Reads the heartbeats of gateways or workers and removes expired ids from their set.
-- KEYS: the set of ids, the heartbeats of the known ids.
-- ARGV: the known ids.
-- Returns the ids of the set, the heartbeats of those that are known ('' for one that is not a string), and the removed ids.
local key, ids, values, lost = {}, {}, {}, {}
for number, id in ipairs(ARGV) do key[id] = KEYS[number + 1] end
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = key[id] and redis.pcall('GET', key[id])
  if type(value) == 'table' then value = '' end
  if key[id] and not value then
    redis.call('SREM', KEYS[1], id)
    lost[#lost + 1] = id
  else
    ids[#ids + 1] = id
    values[#values + 1] = value
  end
end
return {ids, values, lost}
